"""Settings of a server."""

import math
import re
import ssl
from dataclasses import dataclass, field

from hybridrt.base.errors import ConfigError
from hybridrt.base.files import check_file
from hybridrt.channel.auth import check_key
from hybridrt.chat.registry import REASONING_PARSERS, TOOL_PARSERS, choose
from hybridrt.images.fetch import allowed_host
from hybridrt.server.core.api_keys import ApiKey, client_weights
from hybridrt.server.core.pages import host_name

ROLES = ("both", "prefill", "decode")
LOG_LEVELS = ("debug", "info", "warning", "error")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/]+")  # what browsers send
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
MAX_UDS_BYTES = 107  # sockaddr_un
_HTTP_URL = re.compile(r"https?://[^\s/]+\S*")


@dataclass(frozen=True)
class ServerConfig:
    """Every field is checked when the object is made.

    Args:
        host: address to listen on. The default is reached from this machine alone.
        port: 0 takes any free one.
        uds: path of a Unix socket to listen on, instead of `host` and `port`.
        root_path: what a proxy puts before all paths, such as /llm.
        served_model_names: names of the model in requests; empty: the name under which it was
            loaded.
        api_keys: requests need one of them (`Authorization: Bearer KEY`), except /health,
            /ping and /ready. Empty: none needed. Each is a client of its own unless it names one.
        tls_certificate, tls_key: PEM files; both, or neither for plain HTTP.
        allowed_hosts: further names and addresses of the server in `Host`, without a port; "*":
            any. It always answers to localhost, to loopback addresses and to `host`, and to every
            IP address if `host` is 0.0.0.0 or ::.
        allowed_origins: web pages of these origins may call (CORS); "*": all. Empty: none.
        allow_image_urls: hosts from which https addresses of images are fetched; NAME or NAME:PORT.
            Empty: none.
        chat_template: Jinja text that replaces the model's own; None keeps that.
        request_chat_templates: requests may bring a chat template of their own.
        tool_parser, reasoning_parser: names of formats; "auto": by the chat template; "none": off.
        max_waiting: samples that may wait; more are answered with 429.
        max_body_bytes: longer bodies are answered with 413.
        max_prompts: prompts of one request of /v1/completions.
        max_samples: `n` times prompts of one request.
        max_stored_responses: responses of /v1/responses that are kept for later requests; the
            oldest make room. 0 keeps none.
        max_stored_bytes: bytes of all of these.
        request_timeout: seconds that a request may take, its answer's last byte included.
        drain_timeout: seconds that running requests get after SIGTERM.
        step_timeout: seconds after which a step that has not ended makes /health fail.
        stats_interval: seconds between two lines of statistics; 0 writes none.
        log_level: least level of log lines: debug, info, warning or error.
        access_log: write a line for each request.
        otlp_endpoint: for OpenTelemetry spans, such as http://collector:4318/v1/traces; None makes
            none.
        fleet_key: routers need it to read the events of the prefix cache (/fleet/cache_events),
            which hold token ids of all clients. None: nobody can.
        role: "prefill" also computes prompts for servers with the role "decode"; these have their
            prompts computed by the servers at `prefill_urls`, and compute them themselves while
            none of those answers. "both": neither.
        transfer_port: where the role "prefill" listens for decode workers, at `host`; 0: a free
            port. The other roles do not listen.
        transfer_key: of prefill and decode workers.

    Raises:
        ConfigError: a field cannot be used; the text says which.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str | ApiKey, ...] = field(default=(), repr=False)
    tls_certificate: str | None = None
    tls_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allow_image_urls: tuple[str, ...] = ()
    chat_template: str | None = None
    request_chat_templates: bool = False
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_waiting: int = 4096
    max_body_bytes: int = 16 * 2**20
    max_prompts: int = 1024
    max_samples: int = 1024
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * 2**20
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    step_timeout: float = 120.0
    stats_interval: float = 10.0
    log_level: str = "info"
    access_log: bool = True
    otlp_endpoint: str | None = None
    fleet_key: str | None = field(default=None, repr=False)
    role: str = "both"
    prefill_urls: tuple[str, ...] = ()
    transfer_port: int = 0
    transfer_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be 0 to 65535")
        for name in ("max_waiting", "max_body_bytes", "max_prompts", "max_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_stored_responses", "max_stored_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        for name in ("request_timeout", "step_timeout", "drain_timeout", "stats_interval"):
            seconds, zero_is_refused = getattr(self, name), name in ("request_timeout", "step_timeout")
            if not math.isfinite(seconds) or seconds < 0 or (zero_is_refused and seconds == 0):
                least = "above 0" if zero_is_refused else "0 or more"
                raise ConfigError(f"{name} is {seconds}; it must be a number of seconds, {least}")
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"log_level is {self.log_level!r}; it must be one of {', '.join(LOG_LEVELS)}")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"root_path is {self.root_path!r}; it must be like /llm, without a slash at its end")
        if self.uds is not None and not 0 < len(self.uds.encode()) <= MAX_UDS_BYTES:
            raise ConfigError(f"uds has {len(self.uds.encode())} bytes; a path of a socket has 1 to {MAX_UDS_BYTES}")
        self._check_tls()
        for registry, name in ((TOOL_PARSERS, self.tool_parser), (REASONING_PARSERS, self.reasoning_parser)):
            choose(registry, name, template="")  # raises for an unknown name
        self._check_addresses()
        client_weights(self.keys)
        self._check_role()
        if self.fleet_key is not None:
            check_key("the fleet key", ApiKey(self.fleet_key).key.encode())

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return tuple([key if isinstance(key, ApiKey) else ApiKey(key) for key in self.api_keys])

    def _check_role(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role is {self.role!r}; it must be one of {', '.join(ROLES)}")
        if self.role == "decode" and not self.prefill_urls:
            raise ConfigError("the role decode needs prefill URLs, of servers with the role prefill; pass at least one")
        if self.role != "decode" and self.prefill_urls:
            raise ConfigError(f"the role {self.role} uses no prefill URLs; leave them out, or choose the role decode")
        if self.role != "both" and (self.fleet_key is None or self.transfer_key is None):
            raise ConfigError(f"the role {self.role} needs a fleet key and a transfer key (HYBRIDRT_TRANSFER_KEY)")
        for url in self.prefill_urls:
            if not _HTTP_URL.fullmatch(url):
                raise ConfigError(f"prefill URL {url!r}: it must be like http://127.0.0.1:8001")
        if not 0 <= self.transfer_port <= 65535:
            raise ConfigError(f"transfer_port is {self.transfer_port}; it must be 0 to 65535")
        if self.transfer_port and self.role != "prefill":
            raise ConfigError(f"transfer_port is {self.transfer_port}, which only the role prefill uses; leave it out")

    def _check_tls(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("TLS needs a certificate and a key; pass both files, or neither")
        if self.tls_certificate is not None and self.tls_key is not None:
            try:
                for file in (self.tls_certificate, self.tls_key):
                    check_file(file, 1 << 20)
                # Without a password, OpenSSL asks for one on the terminal.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_certificate, self.tls_key, "")
            except (OSError, ValueError) as e:
                raise ConfigError(
                    f"tls_certificate {self.tls_certificate} and tls_key {self.tls_key} cannot be used: {e}; pass PEM "
                    "files of a certificate and its unencrypted key"
                ) from e

    def _check_addresses(self) -> None:
        if host_name(self.host.partition("%")[0]) is None:  # for sockets, "" and "0" are every address
            raise ConfigError(
                f"host is {self.host!r}; it must be a name or an address without a port, like 127.0.0.1 (this machine "
                "alone) or 0.0.0.0 (from everywhere)"
            )
        for host in self.allowed_hosts:
            if host != "*" and host_name(host) is None:
                raise ConfigError(f"allowed host {host!r}: it must be * or a name without a port, like api.example.org")
        for host in self.allow_image_urls:
            allowed_host(host)
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed origin {origin!r}: it must be * or like https://example.org")
        if self.otlp_endpoint is not None and not _HTTP_URL.fullmatch(self.otlp_endpoint):
            raise ConfigError(
                f"otlp_endpoint is {self.otlp_endpoint!r}; it must be a URL such as http://collector:4318/v1/traces"
            )
