"""Serving engines that prune vision tokens by the token methods of this package."""
