"""graphoffload: decide for every tensor that backward needs whether to keep, offload or recompute it.

General layout. `planning/` decides (pure data), `ordering/` judges orders of events (pure), `graphs/` reads and rewrites FX
graphs, `runtime/` moves memory, `backend.py` puts them together; `transform.py` and `explain.py` are its other two faces.
Nothing is defined in this file.
"""

from graphoffload import policies as policies
from graphoffload import testing as testing
from graphoffload._version import __version__ as __version__
from graphoffload.backend import backend as backend
from graphoffload.backend import offload_pair as offload_pair
from graphoffload.errors import GraphOffloadError as GraphOffloadError
from graphoffload.errors import GraphOffloadWarning as GraphOffloadWarning
from graphoffload.errors import InternalError as InternalError
from graphoffload.errors import MachineError as MachineError
from graphoffload.errors import OrderingError as OrderingError
from graphoffload.errors import PolicyError as PolicyError
from graphoffload.errors import SlotError as SlotError
from graphoffload.errors import StalePlanError as StalePlanError
from graphoffload.errors import UnsupportedGraphError as UnsupportedGraphError
from graphoffload.errors import UsageError as UsageError
from graphoffload.explain import explain as explain
from graphoffload.planning.machine import Machine as Machine
from graphoffload.planning.plan import Action as Action
from graphoffload.planning.plan import Plan as Plan
from graphoffload.registry import plans as plans
from graphoffload.report import Explanation as Explanation
from graphoffload.runtime.eager import saved_tensors as saved_tensors
from graphoffload.runtime.keep import keep as keep
from graphoffload.runtime.selective import checkpoint as checkpoint
from graphoffload.runtime.selective import create_selective_checkpoint_contexts as create_selective_checkpoint_contexts
from graphoffload.runtime.stats import SavedTensorsStats as SavedTensorsStats
from graphoffload.transform import Transformed as Transformed
from graphoffload.transform import transform as transform
