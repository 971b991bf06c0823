"""The configuration: one model, read from files and resolved once; plug-ins import from here."""

from shared.config.section import PluginConfig as PluginConfig
from shared.config.section import Section as Section
