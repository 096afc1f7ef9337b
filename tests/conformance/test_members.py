"""Every membership passes the conformance suite: static, and a real etcd."""

import itertools
from collections.abc import Callable

import pytest

from millrace.members import Membership
from millrace.members.etcd import EtcdMembers
from millrace.members.static import StaticMembers
from millrace.testing.conformance import LivingMembershipConformance, MembershipConformance
from millrace.testing.etcd import EtcdServer

_clusters = (f"conformance-{number}" for number in itertools.count())


class TestStaticMembers(MembershipConformance):
    @pytest.fixture
    def connect(self) -> Callable[[], Membership]:
        return lambda: StaticMembers(self.joinable)


@pytest.mark.etcd
class TestEtcdMembers(LivingMembershipConformance):
    @pytest.fixture
    def connect(self, etcd: EtcdServer) -> Callable[[], Membership]:
        cluster = next(_clusters)
        return lambda: EtcdMembers([etcd.address], cluster=cluster, lease_seconds=2)
