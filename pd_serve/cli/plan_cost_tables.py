"""What `pd-serve plan cost` shows to people."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Console

from pd_serve.cli.plan_show import nbytes, plan_console, seconds, share, table
from pd_serve.plan.report import CostReport


def show(report: CostReport, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(report).decode())
        return
    console = plan_console()
    _model(console, report)
    _prompts(console, report)
    _pauses(console, report)
    _verdict(console, report)


def _model(console: Console, report: CostReport) -> None:
    setting, per_token = report.setting, report.token_bytes
    shape = setting.shape
    active = f", {shape.num_active_params / 1e9:.3g}B of them for a token" if shape.num_active_params != shape.num_params else ""
    console.print(f"[bold]{shape.name}[/bold]: {shape.num_params / 1e9:.4g}B parameters{active}; {shape.source}", soft_wrap=True)
    kind = (
        f"{shape.num_layers} layers x one latent of {shape.head_dim}"
        if shape.has_latents
        else f"2 x {shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim}"
    )
    console.print(
        f"KV of a token: {kind} = {_kib(per_token.bfloat16)} in bf16, {_kib(per_token.fp8)} in fp8; "
        f"{_kib(per_token.fp8_with_scales)} as pd-serve keeps fp8, with a scale per token and head",
        soft_wrap=True,
    )
    for note in shape.notes:
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    if shape.is_windowed:
        windows = sorted({window for window in shape.layer_windows if window})
        layers = sum(window > 0 for window in shape.layer_windows)
        console.print(
            f"{layers} of {shape.num_layers} layers see the last {', '.join(f'{window:,}' for window in windows)} tokens only (`seen`); "
            "pd-serve keeps and sends all of them in every layer (`sent`)",
            soft_wrap=True,
        )
    cells = [f"{_kib(each.per_rank)} x {each.tp}" + _copies(each.all_ranks, per_token.chosen) for each in per_token.ranks]
    console.print(f"by TP degree, {setting.dtype.value}: {'; '.join(cells)}", soft_wrap=True)


def _copies(all_ranks: int, once: int) -> str:
    return f" ({all_ranks / once:.0f} copies)" if all_ranks > once else ""


def _prompts(console: Console, report: CostReport) -> None:
    setting = report.setting
    with_seen = setting.shape.is_windowed
    columns = ["prompt", "KV", *(["seen"] if with_seen else []), "sent", "prefill", "attention", "", *(link.name for link in report.links)]
    lines = f" x {setting.num_links}" if setting.num_links > 1 else ""
    title = f"Transfer beside prefill (and as a share of it), {setting.dtype.value}, links{lines}"
    console.print(table(columns, _prompt_rows(report, with_seen), title))
    setup = f", and the set-up of {seconds(setting.setup_s)} that every request has" if setting.setup_s else "; no set-up is counted"
    console.print(f"exposed: what is left when prefill has ended, sent layer by layer{setup}", style="dim", soft_wrap=True)
    if setting.speed.tokens_per_s:
        counted = "prefill is at the measured speed, whatever the length"
    elif setting.has_attention:
        counted = (
            "attention, the share of the FLOP that grows with the square of the prompt, is counted: it lowers the ratio of long prompts"
        )
    else:
        counted = "attention (its share of the FLOP is shown) is not counted, so the ratio is the same at every length; it would lower it"
    console.print(counted, style="dim", soft_wrap=True)


def _prompt_rows(report: CostReport, with_seen: bool) -> Iterator[list[str]]:
    for prompt in report.prompts:
        seen = [nbytes(prompt.seen_nbytes)] if with_seen else []
        cells = [f"{prompt.num_tokens:,}", nbytes(prompt.kv_nbytes), *seen, nbytes(prompt.sent_nbytes), seconds(prompt.prefill_s)]
        yield [
            *cells,
            share(prompt.attention_share),
            "wire",
            *(f"{seconds(each.wire_s)} ({share(each.share)})" for each in prompt.hand_overs),
        ]
        exposed = (f"{seconds(each.exposed_s)} ({share(each.exposed_share)})" for each in prompt.hand_overs)
        yield ["", *([""] if with_seen else []), "", "", "", "", "exposed", *exposed]


def _pauses(console: Console, report: CostReport) -> None:
    told = [f"{seconds(each.longest_s)} {'whole' if not each.chunk else f'in chunks of {each.chunk:,}'}" for each in report.pauses]
    console.print(f"\nOne prompt of {report.pauses_of:,} tokens pauses a colocated decode for {', '.join(told)}", soft_wrap=True)


def _verdict(console: Console, report: CostReport) -> None:
    """In full for the widest link, in a word for the others."""
    place = max(range(len(report.links)), key=lambda index: report.links[index].bytes_per_s)
    found = report.verdicts[place]
    style = {"yes": "green", "no": "red"}.get(found.answer.value, "yellow")
    console.print(f"\nDisaggregate, over {report.links[place].name}? [bold {style}]{found.answer.value}[/]: {found.advice}", soft_wrap=True)
    for mark, lines in (("+", found.reasons), ("-", found.against), ("*", found.conditions)):
        for line in lines:
            console.print(f"  {mark} {line}", markup=False, soft_wrap=True)
    others = [
        f"over {link.name}: {each.answer.value}"
        for link, each in zip(report.links, report.verdicts, strict=True)
        if each.answer is not found.answer
    ]
    if others:
        console.print(f"  {'; '.join(others)}", soft_wrap=True)


def _kib(value: int) -> str:
    """KiB is 1024 bytes."""
    return f"{value / 1024:g} KiB" if value % 512 == 0 else f"{value:,} B"
