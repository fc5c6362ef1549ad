"""How a policy reaches the servers: one protocol, one module per carrier."""

from loraflow.transports.base import Delivered, Delivery, Transport

__all__ = ["Delivered", "Delivery", "Transport"]
