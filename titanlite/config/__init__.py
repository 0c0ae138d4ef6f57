"""The configuration: TOML and flags in, one frozen ``Config`` out. Imports no torch."""

from titanlite.config.load import from_dict, load
from titanlite.config.schema import Config
from titanlite.config.show import toml_text as to_toml

__all__ = ["Config", "from_dict", "load", "to_toml"]
