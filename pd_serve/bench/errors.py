"""The one error of measuring: told in one line by the command line."""

from __future__ import annotations

from pd_serve.errors import PdServeError


class BenchError(PdServeError):
    """What was to be measured cannot be: an endpoint that is not there, a file that is none, two runs that must not be compared."""

    code = "bench_failed"


def missing_library(name: str, error: ImportError) -> BenchError:
    """For the one file that imports the library: `raise missing_library("aiohttp", error) from error`."""
    return BenchError(f"{name} is not installed: pip install 'pd-serve[bench]' ({error})")
