"""Where model folders come from: a local folder, the bundled demo, or the Hugging Face hub. Importing this needs no torch."""

from pd_serve.model_store.progress import Progress
from pd_serve.model_store.resolve import DEMO_ID, resolve_model

__all__ = ["DEMO_ID", "Progress", "resolve_model"]
