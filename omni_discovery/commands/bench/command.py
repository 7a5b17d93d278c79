"""``omni bench``: loads a hub as its clients do, shows how it goes, and tells what they saw."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any, Final

from omni_discovery.commands.output import say
from omni_discovery.commands.registry import add_namespace_option, clients_key, user_runtime_dir
from omni_discovery.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from omni_discovery.commands.bench.client import BenchClient
    from omni_discovery.commands.bench.figures import BenchSummary
    from omni_discovery.commands.bench.load import LoadRun
    from omni_discovery.commands.bench.plan import Asking, LoadPlan

_MODALITIES: Final = ("text", "image", "audio")
_USUAL_REQUESTS: Final = 100
_USUAL_WORDS: Final = 32
#: More words are no prompt that a hub takes: its bodies have 3 MiB.
_MOST_WORDS: Final = 200_000
_MOST_AT_ONCE: Final = 10_000
_MOST_PROMPT_BYTES: Final = 64 << 20
#: How often the live view is drawn, and how often a line is printed where there is no terminal.
_TURN_S, _LINE_S = 0.25, 2.0
_INTERRUPTED: Final = 130
_ANY_HOSTS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - what hubs listen at


class BenchCommand:
    """``omni bench``."""

    summary = "load a running hub, and show latencies, rates and failures as its clients see them"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """See Command."""
        parser.add_argument(
            "--url", metavar="URL", help="the hub's API: http://HOST:PORT (default: the one that you run here)"
        )
        parser.add_argument("--api-key-file", metavar="FILE", help="the key of the API (default: $VLLM_API_KEY)")
        parser.add_argument("--api-key", type=_no_key, help=argparse.SUPPRESS)
        parser.add_argument("--ca-file", metavar="FILE", help="who signed its certificate (default: the system's)")
        load = parser.add_argument_group("how much")
        how = load.add_mutually_exclusive_group()
        how.add_argument(
            "--rate",
            type=float,
            metavar="N",
            help="so many requests a second, at moments drawn by chance (Poisson), whatever becomes of them: as users"
            " come. A latency counts from that moment",
        )
        how.add_argument(
            "--concurrency", type=int, metavar="N", help="so many at any time, the next as one has ended (default: 1)"
        )
        load.add_argument("--requests", type=int, metavar="N", help=f"so many (default: {_USUAL_REQUESTS})")
        load.add_argument("--duration", type=float, metavar="S", help="for so many seconds")
        load.add_argument(
            "--warm-up",
            type=int,
            default=0,
            metavar="N",
            help="send so many requests before, in the same way, that count nowhere (default: none)",
        )
        load.add_argument(
            "--max-in-flight",
            type=int,
            default=1000,
            metavar="N",
            help="with --rate: more than these wait here, and their wait counts (default: %(default)s)",
        )
        load.add_argument(
            "--timeout",
            type=float,
            default=120.0,
            metavar="S",
            help="a request that has not ended by then has failed (default: %(default)g)",
        )
        _add_prompt_options(parser)
        shown = parser.add_argument_group("what comes out")
        shown.add_argument("--plot", metavar="FILE", help="write latencies over time and their distribution, as SVG")
        shown.add_argument("--out", metavar="FILE", help="write the figures and every request, as JSON")
        shown.add_argument("--json", action="store_true", help="print the figures as one line of JSON instead")
        add_namespace_option(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """See Command. Return 0 if nothing but refusals for load went wrong, 1 if something did, 130 after Ctrl-C."""
        import asyncio

        plan = read_plan(arguments)
        prompt_of = _read_prompts(arguments)
        fields = _read_fields(arguments)
        files = [_writable(flag, getattr(arguments, flag)) for flag in ("plot", "out")]
        client = _client(arguments, plan)
        return asyncio.run(_bench(arguments, plan, fields, prompt_of, client, files))


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    asked = parser.add_argument_group("what is asked")
    what = asked.add_mutually_exclusive_group()
    what.add_argument(
        "--modalities",
        metavar="NAME[,...]",
        help=f"what a chat is to answer with, of {', '.join(_MODALITIES)} (default: all that the pipeline has)",
    )
    what.add_argument("--speech", action="store_true", help="have the prompts spoken, by /v1/audio/speech")
    prompts = asked.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt-words", type=int, metavar="N", help=f"made prompts of so many words (default: {_USUAL_WORDS})"
    )
    prompts.add_argument("--prompt-file", metavar="FILE", help="a prompt a line, used in turn")
    asked.add_argument("--max-tokens", type=int, metavar="N", help="the longest answer of the first stage")
    asked.add_argument("--extra-body", metavar="JSON", help="more fields of each request, e.g. '{\"temperature\": 0}'")
    asked.add_argument("--seed", type=int, default=0, metavar="N", help="of arrivals and made prompts (default: 0)")


# ---- what the flags say


def _no_key(_text: str) -> str:
    # Without this, argparse would take it for --api-key-file, and the key for a file's name.
    raise argparse.ArgumentTypeError(
        "every user of this machine can read flags: set VLLM_API_KEY, or give --api-key-file FILE"
    )


def read_plan(arguments: argparse.Namespace) -> LoadPlan:
    """The plan. Raise ConfigError for a wrong number, with what would be right."""
    from omni_discovery.commands.bench.plan import LoadPlan

    for flag in ("rate", "duration", "timeout"):
        value = getattr(arguments, flag)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{flag} is {value:g}; right would be a number above 0")
    most = {"concurrency": _MOST_AT_ONCE, "max_in_flight": _MOST_AT_ONCE, "prompt_words": _MOST_WORDS}
    for flag in ("concurrency", "requests", "max_in_flight", "prompt_words", "max_tokens"):
        value = getattr(arguments, flag)
        if value is not None and not 1 <= value <= most.get(flag, value):
            right = f"1 to {most[flag]}" if flag in most else "1 or more"
            raise ConfigError(f"--{flag.replace('_', '-')} is {value}; right would be {right}")
    if arguments.warm_up < 0:
        raise ConfigError(f"--warm-up is {arguments.warm_up}; right would be 0 or more")
    requests = arguments.requests
    if requests is None and arguments.duration is None:
        requests = _USUAL_REQUESTS
    return LoadPlan(
        requests=requests,
        duration_s=arguments.duration,
        rate_per_s=arguments.rate,
        concurrency=arguments.concurrency or 1,
        most_in_flight=arguments.max_in_flight,
        timeout_s=arguments.timeout,
    )


def _read_prompts(arguments: argparse.Namespace) -> Callable[[int], str]:
    """What makes the prompt of a request by its number. Raise ConfigError for a file that has none."""
    from pathlib import Path
    from random import Random

    from omni_discovery.commands.bench.plan import made_prompt

    file = arguments.prompt_file
    if not file:
        words = arguments.prompt_words or _USUAL_WORDS
        return lambda number: made_prompt(number, words, Random(f"{arguments.seed} {number}").random)
    try:
        size = Path(file).stat().st_size
        text = Path(file).read_text(encoding="utf-8") if size <= _MOST_PROMPT_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {file} can't be read: {error}") from error
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        what = f"has more than {_MOST_PROMPT_BYTES} bytes" if size > _MOST_PROMPT_BYTES else "has no line"
        raise ConfigError(f"--prompt-file {file} {what}; right would be one prompt a line")
    return lambda number: prompts[number % len(prompts)]


def _read_fields(arguments: argparse.Namespace) -> Callable[[str], Asking]:
    """What makes the request of a model's name. Raise ConfigError."""
    import msgspec

    from omni_discovery.commands.bench.plan import Asking

    modalities = tuple(name.strip() for name in (arguments.modalities or "").split(",") if name.strip())
    if unknown := [name for name in modalities if name not in _MODALITIES]:
        raise ConfigError(f"--modalities: {unknown[0]!r} is none; there are {', '.join(_MODALITIES)}")
    try:
        more = msgspec.json.decode(arguments.extra_body or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--extra-body is no JSON object ({error}); right would be e.g. '{{\"temperature\": 0}}'"
        ) from error
    if more.get("stream", True) is not True or more.get("stream_format", "audio") != "audio":
        raise ConfigError("--extra-body: answers are read as they are streamed; leave stream and stream_format out")
    return lambda model: Asking(model, arguments.speech, modalities, arguments.max_tokens, more)


def _writable(flag: str, name: str | None) -> Path | None:
    """The file, which can be written. Raise ConfigError now rather than after the test."""
    from pathlib import Path

    if not name:
        return None
    path = Path(name)
    try:
        with path.open("ab"):
            return path
    except OSError as error:
        raise ConfigError(f"--{flag} {name} can't be written: {error.strerror}") from error


def _client(arguments: argparse.Namespace, plan: LoadPlan) -> BenchClient:
    from omni_discovery.commands.access.secret_file import read_secret_file

    try:
        from omni_discovery.commands.bench.client import BenchClient
    except ImportError as error:
        raise ConfigError(
            f"omni bench needs {error.name or 'httpx'}, which is not installed here: pip install"
            " 'omni-discovery[bench]'"
        ) from error
    file = arguments.api_key_file
    key = read_secret_file("--api-key-file", file).strip() if file else clients_key()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{'--api-key-file' if file else 'VLLM_API_KEY'} holds no key: it is one word of ASCII")
    return BenchClient(arguments.url or local_url(arguments), key, arguments.ca_file or "", plan.timeout_s)


def local_url(arguments: argparse.Namespace) -> str:
    """The URL of the one hub that this user runs here. Raise ConfigError if there is none, or more than one.

    The hub itself is asked, in this user's private folder, and not etcd: the key goes to that address, and who may
    write hubs' records may name any.
    """
    from omni_discovery.receipts.asking import HubUnaskableError, NoReceiptError, ask_process, local_hubs, path_of

    folder, namespace = user_runtime_dir(), arguments.namespace
    try:
        answers = [ask_process(folder, namespace, pid, path_of("hub")) for pid in local_hubs(folder, namespace)]
    except (HubUnaskableError, NoReceiptError) as error:
        raise ConfigError(f"{error}; name one with --url http://HOST:PORT") from error
    # API servers behind one port are hubs, too.
    urls = list({reachable_here(str(answer.get("url", ""))) for answer in answers})
    if len(urls) == 1:
        return urls[0]
    if urls:
        raise ConfigError(f"{len(urls)} hubs of yours run here: choose one with --url: {', '.join(sorted(urls))}")
    raise ConfigError(
        f"no hub of namespace {arguments.namespace!r} runs here under this user: name one with --url http://HOST:PORT,"
        " or give --namespace (omni hubs shows who there is)"
    )


def reachable_here(url: str) -> str:
    """A hub's own URL as this machine reaches it: a hub that listens at all addresses names none."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    host = _ANY_HOSTS.get(parts.hostname or "", parts.hostname or "")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


# ---- the test


async def _bench(
    arguments: argparse.Namespace,
    plan: LoadPlan,
    fields: Callable[[str], Asking],
    prompt_of: Callable[[int], str],
    client: BenchClient,
    files: Sequence[Path | None],
) -> int:
    import asyncio
    import signal
    from dataclasses import replace
    from random import Random

    from omni_discovery.commands.bench.load import LoadRun

    warm_up, draw = arguments.warm_up, Random(arguments.seed).random
    try:
        model = await client.served_model()
        loads = [LoadRun(plan, fields(model), client, lambda number: prompt_of(warm_up + number), draw)]
        if warm_up:
            before = replace(plan, requests=warm_up, duration_s=None)
            loads.insert(0, LoadRun(before, fields(model), client, prompt_of, draw))
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            for each in loads:
                each.interrupt()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        title = f"omni bench: {client.url}, {model}, {plan.describe()}{f' after {warm_up} to warm up' * (warm_up > 0)}"
        if not arguments.json:
            say(title)
        for load in loads:
            summary = await _run_shown(load, "" if load is loads[-1] else "warming up", is_silent=arguments.json)
            if load.is_interrupted or load.is_gone:
                break
    finally:
        await client.close()
    _tell(arguments, load, summary, title, files)
    if load.is_interrupted:
        return _INTERRUPTED
    return 1 if load.is_gone or summary.failed or not summary.answered else 0


async def _run_shown(load: LoadRun, name: str, *, is_silent: bool) -> BenchSummary:
    """Run it to its end, and show meanwhile how it goes; ``name`` stands before that."""
    import asyncio

    showing = asyncio.create_task(_show(load, name, is_silent=is_silent))
    try:
        return await load.run()
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)


async def _show(load: LoadRun, name: str, *, is_silent: bool) -> None:
    """Show how it goes until this is cancelled: two lines that change; without a terminal, one now and then."""
    import asyncio

    from omni_discovery.commands.bench.screen import LATEST, live_lines
    from omni_discovery.commands.terminal import TextConsole

    def lines() -> tuple[str, str]:
        tally = load.tally
        latest = tally.seen[-LATEST:]
        counts = (tally.answered, tally.refused, sum(tally.failed.values()), len(load.waiting_since_s))
        counted, latencies = live_lines(load.seconds, *counts, latest)
        return f"{name} {counted}".lstrip() if name else counted, latencies

    console = TextConsole()
    if is_silent:
        return
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LINE_S)
            say("  ".join(filter(None, lines())))
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            # What a narrow terminal has no room for is cut: a line that wraps would be left behind.
            live.update(Text("\n        ".join(lines()), no_wrap=True, overflow="ellipsis"), refresh=True)
            await asyncio.sleep(_TURN_S)


def _tell(
    arguments: argparse.Namespace, load: LoadRun, summary: BenchSummary, title: str, files: Sequence[Path | None]
) -> None:
    """Print the figures and write the files."""
    from dataclasses import asdict

    from omni_discovery.commands.bench.plot import draw_plot
    from omni_discovery.commands.bench.screen import summary_lines
    from omni_discovery.commands.terminal import print_json
    from omni_discovery.text import harmless_json

    made = {
        "title": title,
        "warm_up": arguments.warm_up,
        "interrupted": load.is_interrupted,
        "hub_gone": load.is_gone,
        **asdict(summary),
    }
    if arguments.json:
        print_json(made)
    else:
        for line in summary_lines(summary):
            say(line)
    if load.is_interrupted:
        say("ended before its end: these are the figures so far", error=True)
    if load.is_gone:
        say("the hub could not be reached any more, so the test ended: its log, or omni status, says why", error=True)
    plot, out = files
    if plot is not None:
        plot.write_text(draw_plot(load.tally.seen, summary.seconds, title), encoding="utf-8")
    if out is not None:
        import msgspec

        whole = {**made, "each": [asdict(each) for each in load.tally.seen]}
        out.write_text(harmless_json(msgspec.json.encode(whole).decode()) + "\n", encoding="utf-8")
