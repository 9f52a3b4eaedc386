"""One process of a router of several: `python -m router.process SPEC`, started by the supervisor and by nobody else."""

from __future__ import annotations

import sys
from pathlib import Path

from pd_serve.errors import PdServeError
from router.main import serve_process
from router.process_spec import ProcessSpec


def main() -> int:
    try:
        return serve_process(ProcessSpec.read(Path(sys.argv[1])))
    except PdServeError as error:
        print(f"pd-serve router: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
