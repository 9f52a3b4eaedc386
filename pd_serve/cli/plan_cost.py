"""`pd-serve plan cost`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pd_serve.cli.options import JsonOption
from pd_serve.errors import ConfigError

if TYPE_CHECKING:
    from pd_serve.kv.layout import KVDtype
    from pd_serve.plan.cost import Setting, Speed
    from pd_serve.plan.hardware import Link

_MODEL = "Model and KV"
_PREFILL = "How fast prompts are computed"
_PATH = "Path between the workers"
_LOAD = "The load, for the verdict"

EPILOG = (
    "Examples:\n\n"
    "  pd-serve plan cost Llama-3.1-70B --prefill-tp 4 --tflops 400 --link 100,200,400\n\n"
    "  pd-serve plan cost Llama-3.1-70B --gpu H100 --utilisation 0.5 --prefill-tp 8 --nics 8 --itl-slo-ms 50 --bursty\n\n"
    "  pd-serve plan cost ./my-model/config.json --kv-dtype fp8 --gpu H200 --link 400 --plot ratio.png\n\n"
    "  pd-serve plan cost demo --prefill-tokens-per-s 1000 --link shm --prompts 128,512,2048     measured, here on one core"
)


def cost(
    model: Annotated[str, typer.Argument(help="config.json or its folder, a hub id in the local cache, or a name such as Llama-3.1-8B")],
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="bf16, fp8 or float32", rich_help_panel=_MODEL)] = "bf16",
    scales: Annotated[
        bool, typer.Option("--scales/--no-scales", help="Count the scales of fp8 as pd-serve keeps them", rich_help_panel=_MODEL)
    ] = True,
    params: Annotated[
        float, typer.Option("--params", min=0.0, help="Parameters, in place of those of config.json: 70e9", rich_help_panel=_MODEL)
    ] = 0.0,
    prompts: Annotated[str, typer.Option("--prompts", help="Prompt tokens, several", rich_help_panel=_LOAD)] = "512,2048,8192,32768",
    tflops: Annotated[float, typer.Option("--tflops", min=0.0, help="Effective TFLOP/s of one GPU", rich_help_panel=_PREFILL)] = 0.0,
    gpu: Annotated[
        str, typer.Option("--gpu", help="H100, H200, A100, B200 ...: its peak, by --utilisation", rich_help_panel=_PREFILL)
    ] = "",
    utilisation: Annotated[float, typer.Option("--utilisation", help="Share of the peak that is reached", rich_help_panel=_PREFILL)] = 0.5,
    prefill_tokens_per_s: Annotated[
        float, typer.Option("--prefill-tokens-per-s", min=0.0, help="Measured, of the whole worker, instead", rich_help_panel=_PREFILL)
    ] = 0.0,
    attention: Annotated[
        bool, typer.Option("--attention/--no-attention", help="Count the quadratic term of prefill", rich_help_panel=_PREFILL)
    ] = True,
    prefill_tp: Annotated[int, typer.Option("--prefill-tp", min=1, help="GPUs of a prefill worker", rich_help_panel=_PREFILL)] = 1,
    decode_tp: Annotated[int, typer.Option("--decode-tp", min=0, help="GPUs of a decode worker; 0: as prefill", rich_help_panel=_PATH)] = 0,
    link: Annotated[
        str,
        typer.Option("--link", help="Gb/s at line rate, nvlink, pcie5, shm, or measured such as 12.5GB/s; several", rich_help_panel=_PATH),
    ] = "100,200,400,800",
    nics: Annotated[int, typer.Option("--nics", min=1, help="Links side by side", rich_help_panel=_PATH)] = 1,
    setup_ms: Annotated[
        float,
        typer.Option("--setup-ms", min=0.0, help="Of every hand-over, not hidden: reserve, first push, notice", rich_help_panel=_PATH),
    ] = 5.0,
    chunks: Annotated[str, typer.Option("--chunks", help="Chunk budgets of a colocated worker", rich_help_panel=_LOAD)] = "2048,512",
    prompt: Annotated[int, typer.Option("--prompt", min=0, help="The prompt that decides; 0: the longest", rich_help_panel=_LOAD)] = 0,
    itl_slo_ms: Annotated[
        float, typer.Option("--itl-slo-ms", min=0.0, max=1e9, help="Limit of p99 ITL; 0: none said", rich_help_panel=_LOAD)
    ] = 0.0,
    bursty: Annotated[bool, typer.Option("--bursty", help="Prompts come in bursts", rich_help_panel=_LOAD)] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Nobody waits for single tokens", rich_help_panel=_LOAD)] = False,
    different_tp: Annotated[
        bool, typer.Option("--different-tp", help="The phases want different parallelism", rich_help_panel=_LOAD)
    ] = False,
    concurrency: Annotated[int, typer.Option("--concurrency", min=0, help="Requests in progress", rich_help_panel=_LOAD)] = 0,
    pool: Annotated[int, typer.Option("--pool", min=0, help="Workers that there are, of both kinds", rich_help_panel=_LOAD)] = 0,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a picture: transfer by prefill over prompt length (PNG)")] = None,
    json: JsonOption = False,
) -> int:
    """What moving a prompt's KV costs beside computing it, what a colocated prompt costs a decode, and whether to part the two."""
    from pd_serve.cli.plan_cost_tables import show
    from pd_serve.plan.cost import Setting
    from pd_serve.plan.hardware import link as link_of
    from pd_serve.plan.models import model_shape, with_params
    from pd_serve.plan.report import cost_report
    from pd_serve.plan.verdict import Hints

    shape = model_shape(model)
    if params:
        shape = with_params(shape, params)
    lengths = _counts("--prompts", prompts)
    links = [link_of(part) for part in link.split(",")]
    setting = Setting(
        shape=shape,
        speed=_speed(tflops, gpu, utilisation, prefill_tokens_per_s, prefill_tp),
        dtype=_dtype(kv_dtype),
        has_scales=scales,
        decode_tp=decode_tp or prefill_tp,
        num_links=nics,
        setup_s=setup_ms / 1e3,
        has_attention=attention,
    )
    hints = Hints(
        prompt_tokens=prompt or max(lengths),
        itl_slo_s=itl_slo_ms / 1e3,
        is_bursty=bursty,
        is_offline=offline,
        has_different_tp=different_tp,
        concurrency=concurrency,
        num_workers=pool,
    )
    report = cost_report(setting, links, lengths, _counts("--chunks", chunks), hints)
    if plot is not None:
        _write_plot(plot, setting, links)
    show(report, as_json=json)
    if plot is not None and not json:
        print(plot)
    return 0


def _speed(tflops: float, gpu: str, utilisation: float, tokens_per_s: float, num_gpus: int) -> Speed:
    from pd_serve.plan.cost import Speed
    from pd_serve.plan.hardware import accelerator

    if sum(bool(given) for given in (tflops, gpu, tokens_per_s)) != 1:
        raise ConfigError("how fast are prompts computed? give one of --tflops, --gpu, --prefill-tokens-per-s")
    if tokens_per_s:
        return Speed(tokens_per_s=tokens_per_s)
    if tflops:
        return Speed(flop_per_s=tflops * 1e12 * num_gpus)
    if not 0 < utilisation <= 1:
        raise ConfigError(f"--utilisation {utilisation:g}: expected more than 0, at most 1")
    return Speed(flop_per_s=accelerator(gpu).bf16_flop_per_s * utilisation * num_gpus)


def _dtype(text: str) -> KVDtype:
    from pd_serve.kv.layout import KVDtype

    names = {
        "bf16": KVDtype.BFLOAT16,
        "bfloat16": KVDtype.BFLOAT16,
        "float16": KVDtype.FLOAT16,
        "fp16": KVDtype.FLOAT16,
        "fp8": KVDtype.FP8_E4M3,
        "fp8_e4m3": KVDtype.FP8_E4M3,
        "float32": KVDtype.FLOAT32,
        "fp32": KVDtype.FLOAT32,
    }
    if text.lower() not in names:
        raise ConfigError(f"--kv-dtype {text}: expected bf16, fp8, float16 or float32")
    return names[text.lower()]


def _counts(option: str, text: str) -> tuple[int, ...]:
    from pd_serve.bench.trace import MOST_TOKENS

    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{option} {text}: expected tokens parted by commas") from None
    if not found or min(found) < 1 or max(found) > MOST_TOKENS:
        raise ConfigError(f"{option} {text}: expected numbers of tokens, from 1 to {MOST_TOKENS:,}")
    return found


def _write_plot(path: Path, setting: Setting, links: list[Link]) -> None:
    from pd_serve.plan.picture import ratio_picture

    picture = ratio_picture(setting, links)
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error.strerror}") from error
