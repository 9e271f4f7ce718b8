"""An OpenAI-compatible service on this machine: policy, ledger and routing for any client."""

from quantroute.proxy._server import Proxy

__all__ = ["Proxy"]
