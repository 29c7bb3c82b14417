"""Every option of the server, described once, in the manner of ``treadle.config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from treadle.config import listed
from treadle.errors import ConfigError

__all__ = ("LOOPBACK", "ServerConfig", "server_from_options")

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
KEYS = {"api_key": "TREADLE_API_KEY", "admin_api_key": "TREADLE_ADMIN_API_KEY"}
METRIC_NAMES: tuple[Literal["treadle", "vllm", "gen_ai"], ...] = ("treadle", "vllm", "gen_ai")
Seconds = Annotated[float, Meta(gt=0)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's address, access rules and limits.

    Build it with ``server_from_options``, which checks every value. ``repr`` never shows a key.
    """

    host: Annotated[
        str, Meta(description="Address to listen on. Others than loopback need --api-key.")
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="TCP port; 0 takes a free one and prints it.")
    ] = 8000
    uds: Annotated[
        str | None, Meta(description="Listen on this unix socket in place of host and port.")
    ] = None
    api_key: Annotated[
        list[str],
        Meta(description="Key that clients must send. Repeatable. Also TREADLE_API_KEY=a,b."),
    ] = msgspec.field(default_factory=list)
    admin_api_key: Annotated[
        list[str],
        Meta(
            description="Key for POST /plugins/ID/reload, off without one. Repeatable. Also "
            "TREADLE_ADMIN_API_KEY=a,b."
        ),
    ] = msgspec.field(default_factory=list)
    share_prefix_cache: Annotated[
        bool,
        Meta(description="Share cached prefixes between API keys (default: each has its own)."),
    ] = False
    insecure: Annotated[
        bool, Meta(description="Allow an address that is not loopback without a key.")
    ] = False
    allowed_hosts: Annotated[
        list[str],
        Meta(description="Host names, beside loopback ones, that a loopback server answers to."),
    ] = msgspec.field(default_factory=list)
    root_path: Annotated[
        str, Meta(description="Path prefix that a proxy in front adds (/llm); stripped if present.")
    ] = ""
    allowed_origins: Annotated[
        list[str], Meta(description="Web origins that may call the server; * is all. Repeatable.")
    ] = msgspec.field(default_factory=list)
    ssl_keyfile: Annotated[str | None, Meta(description="Private key: serve HTTPS.")] = None
    ssl_certfile: Annotated[str | None, Meta(description="Certificate: serve HTTPS.")] = None
    ssl_ca_certs: Annotated[
        str | None, Meta(description="Authorities that must have signed a client's certificate.")
    ] = None

    strict_requests: Annotated[
        bool, Meta(description="Refuse unknown request fields (default: name them in a header).")
    ] = False

    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="Largest request body; more is refused (413).")
    ] = 10 * 2**20
    max_header_bytes: Annotated[
        int, Meta(ge=1024, description="Largest header block; more is refused (431).")
    ] = 64 * 2**10
    header_timeout: Annotated[Seconds, Meta(description="Longest wait for a header block.")] = 10.0
    body_timeout: Annotated[
        Seconds,
        Meta(
            description="Longest pause inside a request body, which may take ten times as long in all."
        ),
    ] = 30.0
    request_timeout: Annotated[
        Seconds, Meta(description="Longest time a request may take, queueing included.")
    ] = 600.0
    hang_timeout: Annotated[
        Seconds,
        Meta(description="Longest time of a step; then the engine is reported as hung."),
    ] = 60.0
    write_timeout: Annotated[
        Seconds, Meta(description="Time without reading after which a client is disconnected.")
    ] = 60.0
    timeout_keep_alive: Annotated[
        Seconds, Meta(description="Idle time before a connection closes.")
    ] = 5.0
    sse_keep_alive_interval: Annotated[
        float,
        Meta(ge=0, description="Idle time after which a stream gets a comment line; 0 sends none."),
    ] = 15.0
    drain_timeout: Annotated[
        float,
        Meta(ge=0, description="Time that running requests may take to finish after SIGTERM."),
    ] = 30.0
    max_stored_responses: Annotated[
        int,
        Meta(ge=0, description="Responses of /v1/responses that are kept; 0 keeps none."),
    ] = 1000
    max_stored_response_bytes: Annotated[
        int, Meta(ge=0, description="Bytes that the responses that are kept take at most.")
    ] = 64 * 2**20

    files_dir: Annotated[
        str | None,
        Meta(description="Folder for /v1/files and /v1/batches, which are off without it."),
    ] = None
    max_file_bytes: Annotated[
        int, Meta(ge=1, description="Largest file of /v1/files; more is refused (413).")
    ] = 200 * 2**20
    max_files: Annotated[
        int, Meta(ge=1, description="Files that are kept, and as many batches that have ended.")
    ] = 1000
    max_stored_file_bytes: Annotated[
        int,
        Meta(
            ge=1, description="Bytes that all files take at most, the output of batches included."
        ),
    ] = 10 * 2**30
    file_lifetime: Annotated[
        int, Meta(ge=1, description="Seconds after which a file is deleted.")
    ] = 30 * 24 * 3600
    max_batch_requests: Annotated[
        int, Meta(ge=1, description="Requests in the file of a batch.")
    ] = 50_000
    max_running_batches: Annotated[
        int, Meta(ge=1, description="Batches that run at once; others wait.")
    ] = 2
    max_batch_concurrency: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Requests of batches that run at once (default: three quarters of --max-num-seqs).",
        ),
    ] = None
    batch_timeout: Annotated[
        Seconds, Meta(description="Time after which a batch expires, waiting included.")
    ] = 24 * 3600.0
    backlog: Annotated[int, Meta(ge=1, description="Connections that may wait for accept.")] = 2048

    enable_request_metrics: Annotated[
        bool, Meta(description="Histograms of TTFT, ITL and latency in /metrics.")
    ] = True
    metric_names: Annotated[
        list[Literal["treadle", "vllm", "gen_ai"]],
        Meta(
            min_length=1,
            description="Names that /metrics uses, each for the same values (default: all of them). "
            "Repeatable.",
        ),
    ] = msgspec.field(default_factory=lambda: list(METRIC_NAMES))
    enable_plugin_metrics: Annotated[
        bool, Meta(description="Calls, times and states of plugins in /metrics.")
    ] = False
    access_log: Annotated[bool, Meta(description="One log line per HTTP request.")] = False
    disable_log_stats: Annotated[
        bool, Meta(description="Leave out the line every ten seconds about speed and load.")
    ] = False
    enable_log_requests: Annotated[
        bool, Meta(description="Log prompts, parameters and what error messages quote of them.")
    ] = False
    max_log_len: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Characters and ids of a prompt that are logged (default: 4096 in all)."),
    ] = None
    log_format: Annotated[
        Literal["text", "json"], Meta(description="Lines of text, or a JSON object in each line.")
    ] = "text"
    log_config_file: Annotated[
        str | None,
        Meta(description="JSON or YAML file for Python's logging.config.dictConfig."),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least level that is logged."),
    ] = "info"

    def __repr__(self) -> str:
        values = {f: getattr(self, f) for f in self.__struct_fields__}
        for name in KEYS:
            values[name] = ["***"] * len(values[name])
        return f"ServerConfig({', '.join(f'{k}={v!r}' for k, v in values.items())})"

    def __post_init__(self) -> None:
        for name in KEYS:
            if any(not key.strip() for key in getattr(self, name)):
                raise ValueError(f"{name} holds an empty key; give each key at least one character")
        if set(self.api_key) & set(self.admin_api_key):
            raise ValueError(
                "a key is both an api_key and an admin_api_key, which would let every client "
                "administer; give administrators a key of their own"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile belong together; give both or none")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError(
                "ssl_ca_certs needs ssl_certfile and ssl_keyfile: without TLS no client's certificate "
                "is asked for"
            )
        if self.root_path and not (self.root_path.startswith("/") and self.root_path[-1] != "/"):
            raise ValueError(
                f"root_path is {self.root_path!r}; it must begin with / and not end with /"
            )
        if not (self.loopback or self.api_key or self.insecure):
            raise ValueError(
                f"host {self.host!r} can be reached from other machines and there is no api_key; "
                "give --api-key (or TREADLE_API_KEY), or --insecure to serve everybody"
            )

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.uds is not None or self.host in LOOPBACK


def server_from_options(
    options: Mapping[str, Any] | None = None, /, **overrides: Any
) -> ServerConfig:
    """Build a config from flat options; ``None`` keeps the default of an option.

    Keys that are not given come from the environment (``KEYS``), comma-separated.
    Raises ``ConfigError`` for an unknown option or a value outside its limits.
    """
    explicit = {k: v for k, v in {**(options or {}), **overrides}.items() if v is not None}
    keys = {option: names for option, variable in KEYS.items() if (names := listed(variable))}
    values = {**keys, **explicit}
    for name in values:
        if name not in ServerConfig.__struct_fields__:
            option_names = ", ".join(sorted(ServerConfig.__struct_fields__))
            raise ConfigError(f"the server has no option {name!r}; known options: {option_names}")
    try:
        return msgspec.convert(values, ServerConfig)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        option = path.rstrip("`").partition("[")[0]
        if option:
            message = f"option {option} is {values.get(option)!r}: {message}"
        raise ConfigError(message) from error
