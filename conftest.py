"""What do all tests share? The emulated accelerator's fixture, and no network."""

import os

pytest_plugins = ["emulator.fixtures"]

# Tests build their models from small configs: nothing may be looked up on the Hugging Face hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Each xdist worker and each subprocess would otherwise start a thread for every core.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
