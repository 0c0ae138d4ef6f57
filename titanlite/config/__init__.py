"""The configuration: TOML and flags in, one frozen ``Config`` out. Imports no torch."""

from titanlite.config.load import from_dict, load
from titanlite.config.schema import Config

__all__ = ["Config", "from_dict", "load"]
