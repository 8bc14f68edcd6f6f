//! The hello that a ps task sends to another ps task.

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId};
use pushpull_common::protocol::message::{BodyCrc, FeatureOffer, Hello, Role};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Features, version};

/// The identity of a ps task and of its cluster.
#[derive(Clone, Debug)]
pub(crate) struct PeerHello {
    pub(crate) task: TaskId,
    pub(crate) identity: Identity,
    pub(crate) features: Features,
}

impl PeerHello {
    /// Builds the hello for one shard of the other task. `newest` is the newest client epoch that
    /// the sender has recorded.
    pub(crate) fn hello(&self, shard: ShardId, newest: ClientEpoch) -> Hello {
        Hello {
            version_oldest: version::OLDEST,
            version_newest: version::NEWEST,
            role: Role::Peer {},
            job: Text::clipped(&*self.task.job),
            task: self.task.index,
            shard,
            incarnation: Incarnation(0),
            client_epoch: newest,
            seen_epoch: RestoreEpoch(0),
            seen_arena: 0,
            seen_step: GlobalStep(0),
            catalogue: None,
            body_crc: BodyCrc::Auto {},
            identity: self.identity.to_wire(),
            auth: List::default(),
            features: FeatureOffer::of(self.features),
        }
    }
}
