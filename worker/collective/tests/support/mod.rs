//! The first frames of a connection, as a stranger writes them.

use pushpull_common::ids::{ClientEpoch, GlobalStep, Incarnation, RestoreEpoch, ShardId};
use pushpull_common::protocol::message::{BodyCrc, FeatureOffer, Hello, Role};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{BodyStamp, Envelope, Features, Message, encode, version};

/// Returns the bytes of a message without a body.
pub(crate) fn frame(message: impl Into<Message>) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(&mut bytes, &Envelope::default(), &message.into(), BodyStamp::NONE);
    bytes
}

/// Returns the hello of a process of the job `ring` with index 0 and incarnation 1.
pub(crate) fn hello(role: Role) -> Hello {
    Hello {
        version_oldest: version::OLDEST,
        version_newest: version::NEWEST,
        role,
        job: Text::clipped("ring"),
        task: 0,
        shard: ShardId { task: 0, shard: 0 },
        incarnation: Incarnation(1),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(0),
        seen_step: GlobalStep(0),
        seen_arena: 0,
        catalogue: None,
        body_crc: BodyCrc::Auto {},
        identity: List::default(),
        auth: None,
        features: FeatureOffer::of(Features::ALL),
    }
}
