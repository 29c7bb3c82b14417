"""The manifests have fields that Kubernetes knows, with values of the right type.

Kubernetes ignores what it does not know: a misspelt probe would be no probe. The client's models are
generated from the API's own schema.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from kubernetes import client
from repository import ROOT

MODELS = {
    "Deployment": "V1Deployment",
    "HorizontalPodAutoscaler": "V2HorizontalPodAutoscaler",
    "PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "PodDisruptionBudget": "V1PodDisruptionBudget",
    "Service": "V1Service",
}
FOREIGN = {"Kustomization", "PodMonitor"}
"""Kinds that are not part of Kubernetes itself."""
SCALARS = {"str": str, "int": int, "bool": bool, "float": (int, float)}
CONTAINER = re.compile(r"(?i)(list|dict)[\[(](?:str, )?(.+)[\])]")


def check(value: Any, type_: str, path: str) -> None:
    """Raise ``AssertionError`` that names the first field of ``value`` which is no ``type_``."""
    if type_ in SCALARS:
        is_right = isinstance(value, SCALARS[type_]) and (type_ == "bool") == isinstance(
            value, bool
        )
        assert is_right, f"{path} is {value!r}, not {type_}"
    elif match := CONTAINER.fullmatch(type_):
        is_list = match[1].lower() == "list"
        assert isinstance(value, list if is_list else dict), f"{path} is {value!r}, not {type_}"
        for key, item in enumerate(value) if is_list else value.items():
            check(item, match[2], f"{path}.{key}")
    elif model := getattr(client, type_, None):
        assert isinstance(value, dict), f"{path} is {value!r}, not {type_}"
        names = {key: name for name, key in model.attribute_map.items()}
        unknown = value.keys() - names.keys()
        assert not unknown, f"{path} has no field {', '.join(sorted(unknown))}"
        for key, item in value.items():
            check(item, model.openapi_types[names[key]], f"{path}.{key}")
        try:  # required fields, and some limits
            model(**{names[key]: item for key, item in value.items()})
        except ValueError as error:
            raise AssertionError(f"{path}: {error}") from error
    else:
        assert type_ in ("object", "Any"), f"{path} has the type {type_}"


def manifests() -> list[Any]:
    return [
        pytest.param(item, id=f"{path.name}-{item['kind']}")
        for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
        for item in yaml.safe_load_all(path.read_text())
    ]


@pytest.mark.parametrize("item", manifests())
def test_kubernetes_knows_every_field(item: dict[str, Any]) -> None:
    if item["kind"] in FOREIGN:
        assert set(item) <= {"apiVersion", "kind", "metadata", "spec", "resources"}
    else:
        check(item, MODELS[item["kind"]], item["kind"])


@pytest.mark.parametrize(
    ("find", "replace", "fault"),
    [
        ("readinessProbe:", "readinesProbe:", "has no field readinesProbe"),
        ("periodSeconds: 5", 'periodSeconds: "5"', "is '5', not int"),
        ("maxSurge: 0", "maxSurges: 0", "has no field maxSurges"),
        ("- name: treadle\n          image: treadle:cuda\n", "- image: treadle:cuda\n", "name"),
        ("replicas: 1", "replicas: true", "is True, not int"),
    ],
)
def test_the_check_finds_faults(find: str, replace: str, fault: str) -> None:
    text = (ROOT / "deploy/kubernetes/deployment.yaml").read_text()
    assert find in text
    text = text.replace(find, replace, 1)
    with pytest.raises(AssertionError, match=fault):
        check(yaml.safe_load(text), "V1Deployment", "Deployment")


def test_every_manifest_is_found() -> None:
    kinds = {param.values[0]["kind"] for param in manifests()}
    assert kinds == MODELS.keys() | FOREIGN
