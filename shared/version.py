"""The version of this meshd."""

VERSION = "0.1.0"
