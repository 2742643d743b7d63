"""Replacements for TorchRec's sharded ``EmbeddingCollection`` and ``EmbeddingBagCollection``, with its types.

    from flexd.torchrec import FlexEmbeddingCollection
    tables = flexd.torchrec.replace(model)

No other package of flexd imports TorchRec.

Raises:
    MissingExtraError: at import, if TorchRec is not installed.
"""

from flexd.core.errors import MissingExtraError

try:
    import torchrec as _torchrec  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        f"flexd.torchrec needs TorchRec ({error})",
        remedy="pip install 'flexd[torchrec]' (without a GPU: pip install --no-deps torchrec fbgemm-gpu-cpu, "
        "then pip install tensordict torchmetrics==1.0.3 tqdm pyre-extensions)",
    ) from error

from flexd.torchrec.replaced_tables import FlexEmbeddingBagCollection, FlexEmbeddingCollection, ReplacedTables
from flexd.torchrec.replacement import replace, restore
from flexd.torchrec.sharding import sharding_plan
from flexd.torchrec.state import FusedOptimizerState, ModelState

__all__ = [
    "FlexEmbeddingBagCollection",
    "FlexEmbeddingCollection",
    "FusedOptimizerState",
    "ModelState",
    "ReplacedTables",
    "replace",
    "restore",
    "sharding_plan",
]
