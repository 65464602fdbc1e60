"""The user's options, checked and combined."""

from .options import Engine, all_options
from .policy import Policy, check_tensor_parallel, make_policy, method_budget

__all__ = ["Engine", "Policy", "all_options", "check_tensor_parallel", "make_policy", "method_budget"]
