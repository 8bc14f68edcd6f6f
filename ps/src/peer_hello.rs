//! The hello that a ps task sends to another ps task.

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId, TaskId};
use pushpull_common::protocol::message::{BodyCrc, FeatureOffer, Hello, Role};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Features, version};
use pushpull_net::Connector;
use pushpull_net::auth::Credentials;

/// The identity of a ps task and of its cluster.
#[derive(Clone, Debug)]
pub(crate) struct PeerHello {
    pub(crate) task: TaskId,
    pub(crate) identity: Identity,
    pub(crate) features: Features,
    /// What it proves itself with.
    pub(crate) credentials: Option<Credentials>,
}

impl PeerHello {
    /// Returns a connector to a shard of another task.
    pub(crate) fn connector(&self, address: &str, shard: ShardId) -> Connector {
        let task = TaskId { index: shard.task, ..self.task.clone() };
        Connector::new(address).credentials(self.credentials.clone()).task(task)
    }

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
            auth: None,
            features: FeatureOffer::of(self.features),
        }
    }
}
