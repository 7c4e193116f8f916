from __future__ import annotations

from trainer.config.search_path import use_plugins

# Hydra looks for plugins once in a process, and a test may ask it before the first that prepares a command
use_plugins()
