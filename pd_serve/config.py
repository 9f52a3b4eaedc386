"""Every setting: type, default, unit and one line of doc. The single source of defaults; docs/configuration.md is checked against it.

Sources in rising precedence: defaults, TOML file, environment PD_SERVE_<SECTION>_<KEY>, flags and --set (config_sources.py merges them).
Unknown keys are errors.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelConfig(Section):
    id: str = Field("demo", description="Local folder, Hugging Face id, `demo` (SmolLM2-135M-Instruct) or `demo-gemma3`")
    name: str = Field("", description="Name clients use; empty: the last part of the id")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="Type of weights, activations and KV")
    max_len: int = Field(0, ge=0, description="Longest prompt + output in tokens; 0: what the model was trained for")
    cache_dir: str = Field("", description="Folder for converted models; empty: the user's cache folder")
    load_format: Literal["auto", "random"] = Field(
        "auto", description="`random` fills the weights from a seed: config.json alone is enough, for benchmarks"
    )
    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral", "deepseek"] = Field(
        "auto", description="How the model writes calls of tools; auto: told from its chat template; none: `tools` are refused"
    )
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1"] = Field(
        "auto",
        description="How it marks reasoning; auto: told from its chat template; qwen3: `<think>`, by itself or its prompt; "
        "deepseek_r1: it always reasons, also without opening it; none: reasoning is content",
    )


class KVConfig(Section):
    block_size: int = Field(16, ge=1, le=256, description="Tokens per KV block")
    dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto", description="Type of KV in the pool; auto: as `model.dtype`; fp8: half of bf16's memory"
    )
    order: Literal["token_major", "head_major"] = Field("token_major", description="Order of a block's elements")
    num_blocks: int = Field(0, ge=0, description="Blocks in the pool; 0: from `memory_bytes`")
    memory_bytes: int = Field(512 * 1024 * 1024, ge=1024 * 1024, description="Bytes of the KV pool when num_blocks is 0 (CPU)")
    gpu_memory_fraction: float = Field(0.85, gt=0, lt=1, description="Share of free GPU memory for the pool when num_blocks is 0 (CUDA)")
    prefix_cache: bool = Field(True, description="Keep finished blocks and reuse them for equal prefixes")
    headroom_tokens: int = Field(64, ge=0, description="Output tokens per sequence that admission reserves room for")
    quarantine_fence_share: float = Field(
        0.25, gt=0, le=1, description="Quarantined share of the pool above which a silent peer is fenced by force"
    )


class EngineConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where the model runs")
    tp: int = Field(1, ge=1, description="Ranks that share one model out by heads (tensor parallelism), each a process with its own device")
    threads: int = Field(0, ge=0, description="Compute threads (OMP_NUM_THREADS); 0: cores divided among the workers on this machine")
    cpu_affinity: str = Field("", description="Cores to pin the worker to, such as `0` or `2-5`; empty: no pinning")
    max_batch_tokens: int = Field(512, ge=1, description="Token budget of one step: decode tokens first, then prefill chunks")
    max_running: int = Field(256, ge=1, description="Sequences in one step")
    max_waiting: int = Field(1024, ge=0, description="Prompts that may wait inside the worker")
    prefill_chunk: int = Field(0, ge=0, description="Longest prefill chunk in tokens; 0: as the budget allows")
    cpu_ops: Literal["auto", "off", "on"] = Field(
        "auto",
        description="Compiled operators for decode on a CPU; auto: built once, in seconds, where a C++ compiler is; on: an error without",
    )
    warm_up_s: float = Field(
        2.0, ge=0, description="Seconds at start in which the usual sizes of steps are computed once, lest the first requests wait for it"
    )
    cuda_graphs: bool = Field(True, description="On CUDA, replay decode steps as captured graphs; one KV block is set aside for them")
    latent_attention: Literal["auto", "torch", "flashinfer"] = Field(
        "auto", description="On CUDA, what attends over latents (MLA); auto: FlashInfer where it is installed and takes the model's sizes"
    )


class TransportConfig(Section):
    name: str = Field("ucx", description="Transport: ucx, nixl, loopback (one process, tests), faulty (tests)")
    binding: Literal["auto", "ucxpy", "libucp"] = Field(
        "auto", description="UCX binding: ucx-py, or libucp through ctypes; auto prefers ucx-py"
    )
    lanes: Literal["auto", "shm", "tcp", "rdma"] = Field("auto", description="Restrict the lanes that may be used")
    min_bandwidth: float = Field(0.0, ge=0, description="Bytes per second of the probe at join below which a peer is refused; 0: any")
    join_timeout_s: float = Field(5.0, gt=0, description="Seconds in which a peer must answer the hello")
    probe_bytes: int = Field(1 << 20, ge=4096, description="Bytes written to measure the lane at join")
    hard_fence_after_s: float = Field(
        10.0, gt=0, description="Seconds a lost or silent local writer may hold quarantined blocks before its process is ended"
    )
    staging_bytes: int = Field(
        8 * 1024 * 1024, ge=256 * 1024, description="Memory behind the pool in which KV is converted for workers of another layout"
    )
    staging_slot_bytes: int = Field(
        256 * 1024, ge=4096, description="Part of it that one conversion takes: KV of one layer is converted and sent in such pieces"
    )
    push_bytes: int = Field(
        4 * 1024 * 1024, ge=0, description="Least KV of one push, bytes: layers of which a step writes less go together; 0: each by itself"
    )
    verify: bool = Field(False, description="Digest of every transferred block in the completion record, checked by decode")


class WorkerConfig(Section):
    id: str = Field("", description="Name of the worker; empty: host, role and port")
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(0, ge=0, le=65535, description="Port of the worker's HTTP and link; 0: a free one")
    advertise: str = Field("", description="Address others reach this worker at; empty: host")
    routers: tuple[str, ...] = Field(("http://127.0.0.1:8000",), description="Routers to register at")
    heartbeat_s: float = Field(1.0, gt=0, description="Seconds between registrations")
    load_interval_s: float = Field(0.1, gt=0, description="Least seconds between two load frames")
    report_interval_s: float = Field(
        2.0, gt=0, description="Seconds between reports of an idle rank to its front and routers; three missed: unhealthy"
    )
    drain_deadline_s: float = Field(30.0, ge=0, description="Seconds that SIGTERM gives running requests")
    quarantine_retry_s: float = Field(1.0, gt=0, description="Seconds between two Abandon notices for a quarantined lease")


class RouterConfig(Section):
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="Port of the OpenAI endpoint; 0: a free one")
    processes: int = Field(
        1, ge=1, le=64, description="Processes that share the port; the limits of open and queued requests hold for all together"
    )
    workers: tuple[str, ...] = Field((), description="Worker addresses to link to besides those that register")
    policy: Literal["least_tokens", "least_ttft", "cache_aware", "power_of_two", "round_robin"] = Field(
        "least_tokens", description="How workers are chosen (docs/routing.md)"
    )
    prefill_policy: Literal["default", "least_tokens", "least_ttft", "cache_aware", "power_of_two", "round_robin"] = Field(
        "default", description="How workers that compute prompts are chosen; default: as `policy`"
    )
    decode_policy: Literal["default", "least_tokens", "least_ttft", "cache_aware", "power_of_two", "round_robin"] = Field(
        "default", description="How workers that generate are chosen; default: as `policy`"
    )
    local_prefill_max_tokens: int = Field(
        0, ge=0, description="Prompts with at most this many uncached tokens are prefilled where they decode"
    )
    max_open_requests: int = Field(2048, ge=1, description="Requests in progress above which clients get 429")
    max_queued_requests: int = Field(
        1024, ge=0, description="Requests of one priority class waiting for a worker above which clients get 429"
    )
    slo_ttft_ms: float = Field(
        0.0, ge=0, description="Requests whose first token is predicted to take more milliseconds get 429 at once; 0: none do"
    )
    slo_itl_ms: float = Field(
        0.0, ge=0, description="Requests that are predicted to find more milliseconds between tokens get 429 at once; 0: none do"
    )
    queue_timeout_s: float = Field(30.0, gt=0, description="Seconds a request waits for a worker before 503")
    transfer_timeout_s: float = Field(60.0, gt=0, description="Seconds from the grant in which the KV must have arrived")
    handover_timeout_s: float = Field(
        10.0, gt=0, description="Seconds after prefill has handed a request over in which decode must have spoken; then it moves"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="Seconds for a whole request")
    max_moves: int = Field(3, ge=0, description="Times one request may be opened again on other workers")
    worker_timeout_s: float = Field(5.0, gt=0, description="Seconds of silence on a link after which a worker is suspected")
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="Largest request body")
    max_n: int = Field(16, ge=1, description="Largest n")
    max_prompt_tokens: int = Field(0, ge=0, description="Longest prompt in tokens; 0: what the model and the workers can hold")
    max_prompt_chars: int = Field(
        0, ge=0, description="Longest prompt in characters, checked before it is tokenized; 0: as many as the longest tokens could cover"
    )
    max_messages: int = Field(2048, ge=1, description="Messages in one chat")
    max_stop_strings: int = Field(4, ge=0, le=64, description="Stop strings of one request")
    max_stop_string_length: int = Field(1024, ge=1, le=16384, description="Longest stop string, in characters")
    max_logit_bias: int = Field(1024, ge=0, le=16384, description="Tokens in one logit_bias")
    max_header_bytes: int = Field(32 * 1024, ge=1024, description="Longest request line and headers together; above: 431")
    max_connections: int = Field(
        4096, ge=1, description="Connections of clients to one process, idle ones included, above which a new one gets 503"
    )
    request_read_timeout_s: float = Field(
        60.0, gt=0, description="Seconds in which a request must have arrived, body included; also those a new connection may be silent"
    )
    client_stall_timeout_s: float = Field(
        30.0, gt=0, description="Seconds for which a client may leave its answer unread before it is cut and its request cancelled"
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="Origins whose web pages may ask, as in https://chat.example.org; *: any; empty: none"
    )
    max_stream_backlog_tokens: int = Field(
        8192, ge=1, description="Tokens that may wait for a client that does not read its stream; above: cut and cancelled"
    )


class StructuredConfig(Section):
    max_bytes: int = Field(65536, ge=1, description="Longest schema, expression or grammar of one request, bytes")
    compile_timeout_s: float = Field(
        2.0, gt=0, description="Seconds in which the router must have compiled it, waiting included; above: 400"
    )
    threads: int = Field(1, ge=1, le=64, description="Threads of a worker that share out the token masks of one step")


class OverloadConfig(Section):
    priority_header: str = Field("x-priority", pattern="^[a-z0-9-]+$", description="Header in which a request may name its priority class")
    classes: tuple[str, ...] = Field(
        ("high", "normal", "low"), min_length=1, max_length=8, description="Priority classes, the most urgent first; lower case"
    )
    default_class: str = Field("normal", description="Class of a request that names none")
    max_queued: tuple[int, ...] = Field(
        (), description="Requests of each class that may wait, in the order of `classes`; empty: `router.max_queued_requests` of each"
    )
    ageing_s: float = Field(
        10.0, gt=0, description="Seconds of waiting after which a class gets every eighth start, however much waits above it"
    )
    requests_per_minute: int = Field(0, ge=0, description="Requests of a key that has no limit of its own; 0: any number")
    tokens_per_minute: int = Field(0, ge=0, description="Tokens, prompts and answers, of a key that has no limit of its own; 0: any number")


class TenantConfig(Section):
    """One of `security.tenants`."""

    name: str = Field(min_length=1, max_length=64, pattern="^[ -~]+$", description="Shown in logs and messages instead of the key")
    key: str = Field(min_length=1, description="What its clients send")
    weight: float = Field(1.0, gt=0, description="Share of what all tenants of a class want more of than there is")
    requests_per_minute: int = Field(0, ge=0, description="0: as `overload.requests_per_minute`")
    tokens_per_minute: int = Field(0, ge=0, description="0: as `overload.tokens_per_minute`")
    priority: str = Field("", description="The most urgent class it may use; empty: any")


class RoutingConfig(Section):
    local_max_uncached_tokens: int = Field(
        0,
        ge=0,
        description="Prompts with at most this many uncached tokens are prefilled where they decode when that is predicted to cost less; "
        "0: `router.local_prefill_max_tokens` alone decides",
    )
    local_margin: float = Field(
        0.2, ge=0, lt=1, description="Share by which the other way must cost less before a decode worker changes between the two"
    )
    local_harm_weight: float = Field(
        1.0, ge=0, description="Seconds of TTFT that one second of a running stream's pause is worth, where a prompt is computed beside it"
    )
    balance_tokens: int = Field(
        4096, ge=0, description="Tokens of load between workers below which they count as balanced, for `cache_aware` and sessions"
    )
    balance_ratio: float = Field(1.5, ge=1, description="Ratio of most to least load up to which `cache_aware` takes workers for balanced")
    session_header: str = Field("x-session-id", description="Header whose value keeps requests on one worker; empty: none is looked at")
    session_max_ratio: float = Field(2.0, ge=1, description="Load, by the mean, above which a worker's sessions go elsewhere")
    stale_reports: int = Field(
        3, ge=1, description="Missed reports (`worker.report_interval_s`) after which a worker counts as loaded as the most loaded one"
    )
    seed: int = Field(0, ge=0, description="Of what `power_of_two` draws")


class BreakerConfig(Section):
    enabled: bool = Field(True, description="Use a worker that keeps failing only when there is nothing else")
    failures_in_a_row: int = Field(5, ge=1, description="Failures in a row of one leg of a worker that open its breaker")
    failure_share: float = Field(0.5, gt=0, le=1, description="Share of failures within the window that opens it too")
    window_requests: int = Field(20, ge=1, description="Requests that the window must hold for that")
    window_s: float = Field(30.0, gt=0, description="Seconds the window looks back")
    open_s: float = Field(
        5.0, gt=0, description="Seconds an open breaker waits before one request tries the worker; doubled after each try that fails"
    )


class RolesConfig(Section):
    auto: bool = Field(False, description="Switch workers between prefill and decode as the load asks; at one router of a cluster only")
    interval_s: float = Field(1.0, gt=0, description="Seconds between two looks at the load")
    hold_s: float = Field(5.0, ge=0, description="Seconds for which one phase must have been short, and the other not, before a switch")
    min_dwell_s: float = Field(30.0, ge=0, description="Seconds after any change of roles or of the fleet before a switch")
    high_use: float = Field(0.85, gt=0, le=1, description="Use of a phase (steps ahead; KV or sequences) above which it is short")
    low_use: float = Field(0.5, ge=0, lt=1, description="Use below which it can spare a worker")
    queue_per_worker: float = Field(2.0, gt=0, description="Waiting requests per prefill worker above which prefill is short")
    ttft_slo_s: float = Field(0.0, ge=0, description="Time to first token that should be met, rounded up to a bucket; 0: not looked at")
    itl_slo_s: float = Field(0.0, ge=0, description="The same for the gap between tokens")
    attainment: float = Field(0.9, gt=0, le=1, description="Share of requests, or of gaps, that should meet it")
    deadline_s: float = Field(30.0, ge=0, description="Seconds that a switched worker has for what it still does in its old role")


class SecurityConfig(Section):
    api_keys: tuple[str, ...] = Field((), description="Keys clients may use; empty: no key is asked for, unless there are `tenants`")
    tenants: tuple[TenantConfig, ...] = Field(
        (), description="Keys with a name, a weight and limits: tables of `name`, `key`, `weight`, ... (overload.md)"
    )
    cluster_secret: str = Field("", description="Shared by routers and workers; needed beyond loopback addresses")
    tls_cert: str = Field("", description="PEM file with the certificate chain this process shows; empty: plain HTTP")
    tls_key: str = Field("", description="PEM file with the key of `tls_cert`")
    tls_ca: str = Field("", description="PEM file with the authorities trusted for https:// routers and workers; empty: the system's")

    @property
    def client_keys(self) -> tuple[str, ...]:
        """All that clients may use."""
        return (*self.api_keys, *(tenant.key for tenant in self.tenants))


class ObserveConfig(Section):
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level logged")
    log_format: Literal["text", "json"] = Field("text", description="Shape of log lines")
    trace_requests: int = Field(16, ge=0, description="Layer-by-layer transfer traces each worker keeps")
    log_requests: bool = Field(False, description="A line in the router's log for each choice that ended")
    otlp_endpoint: str = Field(
        "", description="Address of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request; empty: none. Extra: otel"
    )
    trace_sample_ratio: float = Field(1.0, ge=0, le=1, description="Share of requests traced, of those whose client does not decide it")


class LaunchConfig(Section):
    prefill: int = Field(1, ge=0, description="Prefill workers that `pd-serve up` starts")
    decode: int = Field(1, ge=0, description="Decode workers that `pd-serve up` starts")
    colocated: int = Field(0, ge=0, description="Workers for both phases that `pd-serve up` starts")
    restart: bool = Field(False, description="Start a process that died again, with back-off")
    ready_timeout_s: float = Field(300.0, gt=0, description="Seconds in which everything must be ready after the start")
    run_dir: str = Field(
        "", description="Folder for logs and resolved settings of the processes; empty: a new one under the temporary folder"
    )


class Config(Section):
    """The whole; each process reads the sections it needs. `prefill`, `decode` and `colocated` tables in a file override per role."""

    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    engine: EngineConfig = EngineConfig()
    transport: TransportConfig = TransportConfig()
    worker: WorkerConfig = WorkerConfig()
    router: RouterConfig = RouterConfig()
    breaker: BreakerConfig = BreakerConfig()
    roles: RolesConfig = RolesConfig()
    routing: RoutingConfig = RoutingConfig()
    overload: OverloadConfig = OverloadConfig()
    structured: StructuredConfig = StructuredConfig()
    security: SecurityConfig = SecurityConfig()
    observe: ObserveConfig = ObserveConfig()
    launch: LaunchConfig = LaunchConfig()
