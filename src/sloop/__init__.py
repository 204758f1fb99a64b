"""sloop serves deep-learning models and pipelines inside their deadlines at the least cost."""

__version__ = "0.1.0"

from sloop.errors import Refused

__all__ = ["Refused"]
