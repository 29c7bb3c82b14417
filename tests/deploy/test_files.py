"""The files of ``deploy/`` agree with the server, with each other, and with the tools that read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from http_api import document
from repository import ROOT, members

from treadle_server.config import ServerConfig

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
CHART = DEPLOY / "helm/treadle"
FLAGS = {
    line.split()[1] for line in (ROOT / "tests/cli/flags.txt").read_text().splitlines()
    if line.startswith("serve ")
}  # fmt: skip
NAME = "app.kubernetes.io/name"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OUR_VARIABLE = re.compile(r"\bTREADLE_[A-Z_]+")
OF_COMPOSE = {"TREADLE_MODEL"}
OTHER_FORM = set(
    [
        "accessModes",
        "args",
        "credentials",
        "labels",
        "limits",
        "matchLabels",
        "name",
        "requests",
        "scaleTargetRef",
        "secretKeyRef",
        "selector",
        "valueFrom",
    ]
)
"""Fields that the manifests write in one line, and the templates of the chart in several."""
STOP_SECONDS = 3
"""What the server may take after ``--drain-timeout``: see ``treadle_server.lifecycle``."""


def manifests(path: Path) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(path.read_text()) if item]


def only(path: str) -> dict[str, Any]:
    (item,) = manifests(KUBERNETES / path)
    return item


@pytest.fixture
def pod() -> dict[str, Any]:
    template: dict[str, Any] = only("deployment.yaml")["spec"]["template"]
    return template


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (item,) = pod["spec"]["containers"]
    found: dict[str, Any] = item
    return found


def drain_seconds(arguments: list[str]) -> float:
    return float(arguments[arguments.index("--drain-timeout") + 1])


def seconds(text: str) -> int:
    assert text.endswith("s")
    return int(text.removesuffix("s"))


def texts() -> Iterator[tuple[str, str]]:
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file() and path.suffix != ".json":
            yield path.relative_to(ROOT).as_posix(), path.read_text()


# ------------------------------------------------------------------------------ all of them


def test_every_flag_that_is_given_to_the_server_exists() -> None:
    served = []
    for name, text in texts():
        for line in text.splitlines():
            if re.search(r"\bserve\b", line) and not line.lstrip().startswith("#"):
                served.append(name)
                given = {flag for flag in FLAG.findall(line) if not flag.startswith("--plugin")}
                assert given <= FLAGS, f"{name}: {given - FLAGS}"
    chart = (CHART / "templates/deployment.yaml").read_text()
    given = set(re.findall(r"^ +- (--[a-z-]+)$", chart, re.MULTILINE))
    assert given and given <= FLAGS
    assert {"deploy/Dockerfile", "deploy/compose.yaml", "deploy/ray/cluster.sh"} <= set(served)


def test_every_variable_of_treadle_is_one_that_it_reads() -> None:
    configurations = ("core/treadle/config.py", "server/treadle_server/config.py")
    sources = "".join((ROOT / path).read_text() for path in configurations)
    read = set(OUR_VARIABLE.findall(sources))
    used = {variable for _, text in texts() for variable in OUR_VARIABLE.findall(text)}
    assert used - OF_COMPOSE <= read and "TREADLE_API_KEY" in used


def test_every_file_is_explained() -> None:
    readme = (DEPLOY / "README.md").read_text()
    for path in DEPLOY.iterdir():
        assert f"`{path.name}" in readme, f"deploy/README.md does not mention {path.name}"


# ------------------------------------------------------------------------------- kubernetes


def test_the_kustomization_lists_what_needs_nothing_else() -> None:
    listed = set(only("kustomization.yaml")["resources"])
    files = {path.name for path in KUBERNETES.glob("*.yaml")} - {"kustomization.yaml"}
    assert files - listed == {"autoscaler.yaml", "podmonitor.yaml"} and listed <= files
    for name in files - listed:
        assert "Not part of the kustomization" in (KUBERNETES / name).read_text()


def test_selectors_find_the_pods(pod: dict[str, Any]) -> None:
    labels = pod["metadata"]["labels"].items()
    deployment = only("deployment.yaml")
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        only("service.yaml")["spec"]["selector"],
        only("disruption.yaml")["spec"]["selector"]["matchLabels"],
        only("podmonitor.yaml")["spec"]["selector"]["matchLabels"],
    ]
    assert all(NAME in selector and selector.items() <= labels for selector in selectors)
    scaled = only("autoscaler.yaml")["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("Deployment", deployment["metadata"]["name"])
    assert scaled["apiVersion"] == deployment["apiVersion"]


def test_ports_and_probes_lead_to_the_server(pod: dict[str, Any]) -> None:
    server = container(pod)
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"http": ServerConfig().port}
    assert only("service.yaml")["spec"]["ports"][0]["targetPort"] in ports
    (endpoint,) = only("podmonitor.yaml")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in ports
    routes = document()["paths"]
    assert endpoint["path"] in routes
    probes = {name: server[name]["httpGet"] for name in server if name.endswith("Probe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/health",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    assert all(probe["path"] in routes and probe["port"] in ports for probe in probes.values())
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


def test_a_pod_has_time_to_answer_what_it_has_begun(pod: dict[str, Any]) -> None:
    server = container(pod)
    command, pause = server["lifecycle"]["preStop"]["exec"]["command"]
    needed = float(pause) + drain_seconds(server["args"]) + STOP_SECONDS
    assert command == "sleep" and pod["spec"]["terminationGracePeriodSeconds"] > needed
    chart = (CHART / "templates/deployment.yaml").read_text()
    extra = int(re.findall(r"\{\{ add \.Values\.drainTimeout (\d+) }}", chart)[0])
    assert extra > float(pause) + STOP_SECONDS


def test_a_pod_mounts_every_volume_and_may_write_there_alone(pod: dict[str, Any]) -> None:
    server = container(pod)
    mounts = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert mounts.keys() == volumes.keys()
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == only("volume.yaml")["metadata"]["name"]
    assert server["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"/home/treadle/.cache", "/home/treadle/.triton", "/tmp"} <= set(mounts.values())


def test_the_secret_has_one_name(pod: dict[str, Any]) -> None:
    (variable,) = container(pod)["env"]
    reference = variable["valueFrom"]["secretKeyRef"]
    (endpoint,) = only("podmonitor.yaml")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == reference
    values = yaml.safe_load((CHART / "values.yaml").read_text())["apiKey"]
    assert (values["existingSecret"], values["key"]) == (reference["name"], reference["key"])
    command = f"create secret generic {reference['name']} --from-literal={reference['key']}="
    assert command in (KUBERNETES / "kustomization.yaml").read_text()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_it() -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    kinds = {item["kind"] for item in yaml.safe_load_all(process.stdout)}
    assert kinds == {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"}


# ------------------------------------------------------------------------------------- helm


def test_the_values_of_the_chart_satisfy_its_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.validate(values, schema)
    assert values.keys() == schema["properties"].keys() - {"global"}
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate({**values, "replica": 2}, schema)


def leaves(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in data.items():
        if isinstance(value, dict) and value and f"{prefix}{name}" != "resources":
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_the_templates_use_every_value_and_no_other() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = "\n".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
    used = {name.removesuffix(".limits") for name in re.findall(r"\.Values\.([\w.]+)", text)}
    assert used == set(leaves(values))
    defined = set(re.findall(r'define "([\w.]+)"', text))
    assert set(re.findall(r'include "([\w.]+)"', text)) == defined


def test_the_chart_has_the_version_of_treadle() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_the_chart_says_what_the_manifest_says() -> None:
    """Each line of a manifest is one of the template, or the template computes that field."""
    for name in ("deployment", "service", "volume", "disruption", "autoscaler", "podmonitor"):
        template = (CHART / f"templates/{name}.yaml").read_text()
        lines = {line.strip() for line in template.splitlines()}
        computed = {line.partition(":")[0].lstrip("- ") for line in lines if "{{" in line}
        for line in (KUBERNETES / f"{name}.yaml").read_text().splitlines():
            field = line.strip().partition(":")[0].lstrip("- ")
            bare = line.strip().partition(" #")[0]
            known = line.strip() in lines or any(other.startswith(bare) for other in lines)
            assert known or field in computed | OTHER_FORM or bare.startswith("#"), (
                f"{name}: {line}"
            )


@pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm")
def test_helm_renders_the_manifest() -> None:
    process = subprocess.run(
        ["helm", "template", "treadle", str(CHART)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    rendered = {item["kind"]: item for item in yaml.safe_load_all(process.stdout) if item}
    assert rendered.keys() == {
        "Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget",
    }  # fmt: skip
    ours = only("deployment.yaml")["spec"]["template"]["spec"]
    theirs = rendered["Deployment"]["spec"]["template"]["spec"]
    theirs["containers"][0].pop("imagePullPolicy")
    assert theirs == ours
    assert subprocess.run(["helm", "lint", str(CHART)], check=False).returncode == 0


# ------------------------------------------------------------------------------- containers


def dockerfile() -> list[list[str]]:
    """The instructions of the Dockerfile, each as words."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_has_the_targets_that_compose_builds() -> None:
    stages = [words[3] for words in dockerfile() if words[0] == "FROM"]
    assert {"cpu", "cuda"} <= set(stages)
    for name, target in (("compose.yaml", "cpu"), ("compose.cuda.yaml", "cuda")):
        service = yaml.safe_load((DEPLOY / name).read_text())["services"]["treadle"]
        assert (service["build"]["target"], service["image"]) == (target, f"treadle:{target}")
    copied = [w.removeprefix("--from=") for ws in dockerfile() for w in ws if "--from=" in w]
    bases = [words[1] for words in dockerfile() if words[0] == "FROM" and "{" not in words[1]]
    assert set(copied + bases) <= set(stages)


def test_the_image_ends_as_a_user_whom_the_pod_names(pod: dict[str, Any]) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (uid,) = set(re.findall(r"^USER (\d+)$", text, re.MULTILINE))
    assert f"--uid {uid} " in text
    for stage in ("cpu", "cuda"):
        lines = text.partition(f" AS {stage}\n")[2].partition("\nFROM ")[0].split("\n")
        assert [line for line in lines if line][-1] == f"USER {uid}"
    context = pod["spec"]["securityContext"]
    assert str(context["runAsUser"]) == str(context["fsGroup"]) == uid and context["runAsNonRoot"]


def test_the_image_is_what_the_server_expects() -> None:
    words = dockerfile()
    (port,) = (w[1] for w in words if w[0] == "EXPOSE")
    assert int(port) == ServerConfig().port
    (check,) = (" ".join(w) for w in words if w[0] == "HEALTHCHECK")
    path = re.findall(rf"http://127\.0\.0\.1:{port}(/\w+)", check)[0]
    assert path in document()["paths"]
    program = json.loads(check.partition(" CMD ")[2])
    compile(program[2], "HEALTHCHECK", "exec")
    copied = [w[1:-1] for w in words if w[0] == "COPY" and not w[1].startswith("--")]
    assert all((ROOT / source).exists() for sources in copied for source in sources)
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    (python,) = {w[1].partition("=")[2] for w in words if w[:1] == ["ARG"] and "PYTHON" in w[1]}
    assert tuple(map(int, python.split("."))) >= tuple(
        map(int, needed.removeprefix(">=").split("."))
    )
    assert "--require-hashes" in (DEPLOY / "Dockerfile").read_text()


def test_the_health_check_tells_a_server_from_none(tmp_path: Path) -> None:
    (check,) = (" ".join(w) for w in dockerfile() if w[0] == "HEALTHCHECK")
    program = json.loads(check.partition(" CMD ")[2])[2].replace("127.0.0.1:8000", "127.0.0.1:1")
    assert subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False
    ).returncode


def test_what_is_not_sent_to_the_build_is_not_needed_there() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split())
    needed = {member.path.split("/")[0] for member in members()}
    needed |= {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE"}
    needed |= {"requirements.lock", "constraints.txt"}
    assert not needed & ignored and all((ROOT / name).exists() for name in needed)


def test_compose_joins_its_services() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    server = services["treadle"]
    assert seconds(server["stop_grace_period"]) > drain_seconds(server["command"]) + STOP_SECONDS
    scrapes = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (scrape,) = scrapes["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host in services and server["ports"][0].endswith(f":{port}")
    (secret,) = services["prometheus"]["secrets"]
    assert scrape["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert compose["secrets"][secret]["environment"] in server["environment"]
    assert scrapes["rule_files"] == ["alerts.yml"]
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            known = (
                (DEPLOY / source).exists()
                if source.startswith(".")
                else source in compose["volumes"]
            )
            assert known, source
        assert all(p.startswith("127.0.0.1:") for p in service["ports"]), (
            "open to this machine only"
        )


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    provisioning = DEPLOY / "grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    assert re.fullmatch(r"http://(\w+):9090", source["url"])[1] in services  # type: ignore[index]
    (provider,) = yaml.safe_load((provisioning / "dashboards/treadle.yaml").read_text())[
        "providers"
    ]
    mounted = {v.split(":")[1] for v in services["grafana"]["volumes"]}
    assert f"{provider['options']['path']}/treadle.json" in mounted
    interval = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["global"]
    assert source["jsonData"]["timeInterval"] == interval["scrape_interval"]


# ------------------------------------------------------------------ systemd, nginx, the cluster


def test_the_unit_and_the_proxy_wait_longer_than_the_server() -> None:
    server = ServerConfig()
    unit = (DEPLOY / "systemd/treadle.service").read_text()
    assert int(re.findall(r"TimeoutStopSec=(\d+)", unit)[0]) > server.drain_timeout + STOP_SECONDS
    proxy = (DEPLOY / "nginx.conf").read_text()
    assert int(re.findall(r"proxy_read_timeout (\d+)s", proxy)[0]) > server.request_timeout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd/treadle.service").read_text()
    unit = tmp_path / "treadle.service"
    unit.write_text(
        text.replace("/opt/treadle/bin/treadle", "/bin/true").replace("User=treadle", "User=root")
    )
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "cluster.sh head"),
        (["join"], 2, "cluster.sh join ADDRESS"),
        (["serve", "2"], 2, "cluster.sh serve"),
        (["serve", "two", "model"], 2, "cluster.sh serve"),
        (["head"], 1, "RAY_AUTH_TOKEN is not set"),
        (["join", "host:1"], 1, "RAY_AUTH_TOKEN is not set"),
        (["serve", "2", "model"], 1, "RAY_AUTH_TOKEN is not set"),
    ],
)
def test_the_cluster_script_explains_itself(arguments: list[str], code: int, text: str) -> None:
    command = [str(DEPLOY / "ray/cluster.sh"), *arguments]
    process = subprocess.run(
        command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert process.returncode == code and text in process.stderr


def test_the_cluster_script_uses_options_of_the_executor() -> None:
    from treadle_executor_ray import RayOptions

    options = re.findall(
        r"--plugin\.executors\.ray\.(\w+)", (DEPLOY / "ray/cluster.sh").read_text()
    )
    assert options and set(options) <= set(RayOptions.__struct_fields__)
