"""The user's options, checked and combined."""

from .make import make_policy, method_budget
from .options import Engine, all_options
from .policy import Policy

__all__ = ["Engine", "Policy", "all_options", "make_policy", "method_budget"]
