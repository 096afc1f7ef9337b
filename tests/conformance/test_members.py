"""Every membership passes the conformance suite: static, and a real etcd."""

import itertools
from collections.abc import Callable

import pytest
from tests.support.etcd import EtcdServer

from millrace.cluster.membership import Membership
from millrace.cluster.membership.etcd import EtcdMembers
from millrace.cluster.membership.static import StaticMembers
from millrace.testing.conformance import LivingMembershipConformance, MembershipConformance

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
