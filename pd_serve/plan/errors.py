"""The one error of planning: told in one line by the command line."""

from __future__ import annotations

from pd_serve.errors import PdServeError


class PlanError(PdServeError):
    """What was asked cannot be answered: an unknown name, numbers that do not fit each other, a system that measured nothing."""

    code = "plan_failed"
