"""The configuration: one model, read from files and resolved once; plug-ins import from here."""

from murmur.shared.config.section import PluginConfig as PluginConfig
from murmur.shared.config.section import Section as Section
