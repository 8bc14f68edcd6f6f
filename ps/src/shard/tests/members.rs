//! Membership: leases, leaving, and coming back.

use std::time::Duration;

use pushpull_common::ids::PartitionId;
use pushpull_common::protocol::decode::slice_source;
use pushpull_common::protocol::message::{self, Role, Selection};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{
    BodyStamp, Envelope, FrameEvent, FrameProgress, FrameReader, FrameSink, Message, encode,
};
use pushpull_optim::optimizer::Sgd;

use super::peers::{Push, variables, worker};
use super::world::{ConnectionId, World};
use crate::shard::ShardInput;

const LEASE: Duration = Duration::from_secs(5);

#[test]
fn members_are_counted_as_they_join_leave_and_are_lost() {
    let mut world = World::bare(variables(), Sgd::new(1.0), |config| config);
    let a = world.join(0, &mut worker(1));
    let b = world.join(0, &mut worker(2));
    let mut reader = worker(3);
    reader.role = Role::Reader {};
    world.join(0, &mut reader);
    assert_eq!(world.members[0], (2, 2), "a reader is not a member");
    assert!(matches!(world.ask(a, message::Leave {}.into()), Message::Left(_)));
    assert_eq!(world.members[0], (2, 1));
    world.disconnect(b);
    assert_eq!(world.members[0], (2, 1), "it may come back");
    world.pass(LEASE - Duration::from_millis(50), &[]);
    assert_eq!(world.members[0], (2, 1));
    world.pass(Duration::from_millis(50), &[]);
    assert_eq!((world.members[0], world.metrics().members_lost), ((2, 0), 1));
}

#[test]
fn the_server_ends_the_training_and_says_goodbye_to_its_clients() {
    let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), |config| config.last_step(1));
    let a = world.join(0, &mut worker(1));
    let token = world.token(chief[0]);
    let newest = pushpull_common::ids::TokenId(u64::MAX);
    let waiting = world.say(a, message::TokenRequest { newest }.into());
    assert_eq!(world.answer(a, waiting), None, "the only step is promised");
    world.input(0, ShardInput::Finish);
    let reason = message::EndReason::Finished {};
    assert_eq!(world.answer(a, waiting), Some(message::Ended { reason }.into()));
    // A token that is out may still be spent.
    let push = Push::gradient(1, token, world.push_slot(chief[0]));
    let answer = world.push_answer(chief[0], &push, &[(0, &super::peers::bytes_of(&[1_f32; 3]))]);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
    let hello = message::Hello { features: Default::default(), ..worker(2).hello(0) };
    let (older, _) = world.handshake(0, hello, false).unwrap();
    world.input(0, ShardInput::Goodbye);
    let unasked = world.answer(older, pushpull_common::ids::RequestId(0));
    assert_eq!(unasked, None, "it does not know the message");
    for line in [chief[0], a] {
        let unasked = world.answer(line, pushpull_common::ids::RequestId(0));
        assert_eq!(unasked, Some(message::Goodbye {}.into()));
    }
}

#[test]
fn bytes_of_a_body_renew_a_lease_and_those_over_a_replaced_connection_do_not() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let mut peer = worker(1);
    let line = world.join(0, &mut peer);
    let push = Push::gradient(1, world.token(line), world.push_slot(line));
    world.announce(line, push.envelope(), push.part(0, Some(16)), 16);
    for end in 1..5 {
        world.pass(LEASE - Duration::from_millis(50), &[]);
        world.body_until(line, &[0; 16], end);
    }
    assert_eq!(world.members[0].1, 1, "the chief is lost, the sender is not");
    world.join(0, &mut peer);
    world.pass(LEASE / 2, &[]);
    world.body_until(line, &[0; 16], 8);
    world.pass(LEASE / 2, &[]);
    assert_eq!(world.members[0].1, 0);
}

/// Passes the inputs of a connection to a shard of a world.
struct ShardInputs<'a> {
    world: &'a mut World,
    line: ConnectionId,
}

impl FrameSink for ShardInputs<'_> {
    fn on_frame(&mut self, event: FrameEvent<'_>) {
        self.world.input(self.line.shard, ShardInput::of_frame(self.line.connection, event));
    }

    fn with_body<R>(&mut self, receive: impl FnOnce(Option<&mut [&mut [u8]]>) -> R) -> R {
        self.world.shards[self.line.shard].with_body(self.line.connection, receive)
    }
}

/// Delivers bytes over a connection, and returns the result of the last read.
fn deliver(
    world: &mut World,
    line: ConnectionId,
    reader: &mut FrameReader,
    bytes: &[u8],
) -> FrameProgress {
    reader.receive(&mut slice_source(bytes), &mut ShardInputs { world, line }).unwrap()
}

#[test]
fn every_byte_of_a_header_a_meta_and_a_body_renews_the_lease() {
    let partitions = List::new((0..1000).map(PartitionId).collect()).unwrap();
    let large = message::Pull { selection: Selection::Partitions { partitions } }.into();
    let (mut world, _) =
        World::ready(variables(), Sgd::new(1.0), |config| config.token_timeout(None));
    let line = world.join(0, &mut worker(1));
    let push = Push::gradient(1, world.token(line), world.push_slot(line));
    let part = push.part(0, Some(16));
    let mut reader = FrameReader::new();
    reader.open();
    // Each message arrives in pieces of this size, one within each lease.
    for (message, body, piece) in [(large, 0, 250), (part, 16, 1)] {
        let mut bytes = Vec::new();
        let stamp = BodyStamp::plain(body);
        encode(&mut bytes, &push.envelope(), &message, stamp);
        bytes.resize(bytes.len() + body as usize, 0);
        let pieces = bytes.chunks(piece).len();
        assert!(pieces > 10, "{pieces}");
        let whole: usize = bytes
            .chunks(piece)
            .map(|piece| {
                world.pass(LEASE - Duration::from_millis(50), &[]);
                let result = deliver(&mut world, line, &mut reader, piece);
                assert!(!world.closed.contains(&line), "{} of {message:?}", reader.bytes());
                usize::from(result == FrameProgress::Whole)
            })
            .sum();
        assert_eq!(whole, if body > 0 { 2 } else { 1 });
    }
    assert_eq!(world.members[0].1, 1, "the chief is lost, the sender is not");
    assert_eq!(world.metrics().tokens_taken_back, 0, "the client keeps its token");
    // Half a header renews the lease once. A client that stops there is lost.
    let mut bytes = Vec::new();
    encode(&mut bytes, &Envelope::default(), &message::Heartbeat {}.into(), BodyStamp::NONE);
    assert_eq!(deliver(&mut world, line, &mut reader, &bytes[..40]), FrameProgress::Blocked);
    world.pass(LEASE, &[]);
    assert!(world.closed.contains(&line));
    assert_eq!(world.members[0].1, 0);
}

#[test]
fn a_pause_of_the_server_loses_no_member() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let line = world.join(0, &mut worker(1));
    let push = Push::gradient(1, world.token(line), world.push_slot(line));
    world.send(line, push.envelope(), push.part(0, None), &[0; 16]);
    world.tick();
    world.now += Duration::from_secs(3600);
    world.tick();
    assert_eq!(world.members[0], (2, 2));
    let answer = world.push_answer(line, &push, &[(16, &[0; 16])]);
    assert!(
        matches!(answer, Message::Refused(_)),
        "for its length, not for its push slot: {answer:?}"
    );
    // The tick after a pause does not move an earlier message into the future.
    world.now += Duration::from_secs(3600);
    let heartbeat = world.say(line, message::Heartbeat {}.into());
    assert!(world.answer(line, heartbeat).is_some());
    world.tick();
    assert_eq!(world.members[0], (2, 2));
    world.pass(LEASE, &[]);
    assert_eq!(world.members[0], (2, 0));
}

#[test]
fn a_client_that_was_lost_or_has_left_may_come_back_and_resend() {
    for lost in [false, true] {
        let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
        let mut peer = worker(1);
        let line = world.join(0, &mut peer);
        let push = Push::gradient(1, world.token(line), world.push_slot(line));
        world.push_answer(line, &push, &[(0, &[0; 16])]);
        let unspent = world.token(line);
        if lost {
            world.pass(LEASE, &[]);
            assert!(world.closed.contains(&line));
            // Messages before the end of the connection are ignored, and not refused.
            let late = world.say(line, message::TokenRequest { newest: 0.into() }.into());
            assert_eq!(world.answer(line, late), None);
        } else {
            world.ask(line, message::Leave {}.into());
            assert!(matches!(world.ask(line, message::Leave {}.into()), Message::Left(_)));
        }
        let present = world.members[0].1;
        let line = world.join(0, &mut peer);
        assert_eq!(world.members[0], (2, present + 1));
        let request = world.push(line, &push, &[(0, &[0; 16])]);
        let Some(Message::PushAnswer(answer)) = world.answer(line, request) else { panic!() };
        assert!(answer.duplicate);
        let push = Push::gradient(2, unspent, world.push_slot(line));
        let answer = world.push_answer(line, &push, &[(0, &[0; 16])]);
        assert!(matches!(answer, Message::Refused(_)), "its token was returned: {answer:?}");
    }
}

#[test]
fn a_whole_push_of_a_lost_client_is_known_when_it_comes_back() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let mut peer = worker(1);
    let line = world.join(0, &mut peer);
    let push = Push::gradient(1, world.token(line), world.push_slot(line));
    world.push(line, &push, &[(0, &[0; 16])]);
    world.pass(LEASE, &[]);
    let line = world.join(0, &mut peer);
    let request = world.push(line, &push, &[(0, &[0; 16])]);
    world.work();
    let Some(Message::PushAnswer(answer)) = world.answer(line, request) else { panic!() };
    assert!(!answer.duplicate, "it was not applied before");
    assert_eq!(world.metrics().global_step, 1);
}
