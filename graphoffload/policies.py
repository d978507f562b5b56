"""The policies, by the names that users write: `graphoffload.policies.OffloadAll()`."""

from graphoffload.planning.policy import ByName as ByName
from graphoffload.planning.policy import FirstOf as FirstOf
from graphoffload.planning.policy import FollowTags as FollowTags
from graphoffload.planning.policy import KeepAll as KeepAll
from graphoffload.planning.policy import Ledger as Ledger
from graphoffload.planning.policy import Never as Never
from graphoffload.planning.policy import OffloadAll as OffloadAll
from graphoffload.planning.policy import OffloadBytes as OffloadBytes
from graphoffload.planning.policy import OffloadHidden as OffloadHidden
from graphoffload.planning.policy import Only as Only
from graphoffload.planning.policy import Policy as Policy
from graphoffload.planning.policy import policy_from_json as policy_from_json
from graphoffload.planning.policy import policy_to_json as policy_to_json
from graphoffload.planning.values import Value as Value
