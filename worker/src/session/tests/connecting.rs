//! Connecting: who comes first, what must agree, how long to pause, whom an error names.

use std::time::Duration;

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep};
use pushpull_common::protocol::message::{CatalogueState, Role};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Message, Refusal, message};

use super::world::{OWNER, World, grant, ms, order, plan, refused, shard, welcome};
use crate::error::Error;
use crate::session::{Command, Reply};

fn open(world: &mut World, tasks: u32, timeout: Duration) -> crate::session::OpId {
    world.call_within(Command::Open { shards: (0..tasks).map(shard).collect() }, timeout)
}

#[test]
fn the_owner_comes_first_and_says_who_we_are_to_the_others() {
    let mut world = World::new();
    let op = open(&mut world, 3, ms(60_000));
    assert_eq!(world.connects, [OWNER]);
    let hello = world.accept(OWNER);
    assert_eq!(hello.client_epoch, ClientEpoch(0));
    assert_eq!(world.connects, [1, 2]);
    assert_eq!(world.accept(1).client_epoch, ClientEpoch(3));
    assert!(world.waits(op));
    world.accept(2);
    assert!(matches!(world.reply(op), Ok(Reply::Opened(_))));
    world.reconnect(OWNER);
    world.cut(OWNER);
    world.wait_for_connect(OWNER);
    assert_eq!(world.accept(OWNER).client_epoch, ClientEpoch(3), "the same client, not a new one");
}

#[test]
fn a_reader_needs_no_epoch() {
    let mut world = World::with(|start| start.role = Role::Reader {});
    open(&mut world, 2, ms(60_000));
    assert_eq!(world.connects, [0, 1]);
    world.accept(1);
    assert_eq!(world.accept(0).client_epoch, ClientEpoch(0));
}

#[test]
fn servers_that_disagree_end_the_session_with_both_values() {
    let mut world = World::new();
    let op = open(&mut world, 2, ms(60_000));
    for (link, optimizer) in [(0, "adam"), (1, "sgd")] {
        let hello = world.connect(link);
        let identity = Identity::new().with("optimizer", optimizer).to_wire();
        world.answer(&hello, message::Welcome { identity, ..welcome() });
    }
    let error = world.reply(op).unwrap_err();
    let Error::Identity { left, right, field, left_value, right_value, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!((*left, *right, &field[..]), (shard(0), shard(1), "optimizer"));
    assert_eq!((&left_value[..], &right_value[..]), ("adam", "sgd"));
    assert_eq!(world.closed.len(), 2);
    let later = world.call(Command::Token);
    assert_eq!(world.reply(later).unwrap_err(), error, "all that comes after fails alike");
    world.pass(Duration::from_secs(600));
    assert!(world.connects.is_empty() && world.sent.is_empty(), "it has given up");
}

#[test]
fn a_deadline_names_the_silent_shards_and_what_was_heard_of_them() {
    let mut world = World::new();
    let op = open(&mut world, 2, ms(200));
    world.accept(OWNER);
    world.cut(1);
    world.pass(ms(199));
    assert!(world.waits(op));
    world.cut(1);
    world.pass(ms(1));
    let Err(Error::Timeout { doing, waited, awaited, sequence }) = world.reply(op) else {
        panic!()
    };
    assert_eq!((doing, waited, sequence), ("connect", ms(200), None));
    assert_eq!(awaited.0.len(), 1, "the owner has answered: {awaited}");
    assert_eq!(awaited.0[0].shard, shard(1));
    assert_eq!(awaited.0[0].address, "host1:1");
    assert_eq!(awaited.0[0].last, "connection reset");
}

#[test]
fn progress_is_told_at_the_interval_while_a_server_is_silent() {
    let mut world = World::new();
    let op = open(&mut world, 2, Duration::from_secs(300));
    world.accept(OWNER);
    world.pass(Duration::from_secs(25));
    let times: Vec<u64> = world.progress.iter().map(|(at, _)| at.as_secs()).collect();
    assert_eq!(times, [10, 20]);
    assert_eq!(world.progress[0].1.0[0].shard, shard(1));
    assert_eq!(world.progress[0].1.0[0].last, "not connected yet");
    world.accept(1);
    world.reply(op).unwrap();
    let waits = world.call_within(Command::Token, Duration::from_secs(300));
    world.pass(Duration::from_secs(60));
    assert!(world.waits(waits) && world.progress.len() == 2, "nobody is silent");
    let request = world.heard(OWNER, "TokenRequest");
    world.answer(&request, message::Ended { reason: message::EndReason::Finished {} });
    world.reply(waits).unwrap();
    world.cut(1);
    world.pass(Duration::from_secs(9));
    let plan = plan(2, 1);
    let pull = world.pull(&plan);
    world.pass(Duration::from_secs(9));
    assert_eq!(world.progress.len(), 2, "the new operation has not waited for an interval");
    world.pass(Duration::from_secs(1));
    assert!(world.waits(pull) && world.progress.len() == 3);
}

#[test]
fn a_server_that_is_connected_and_does_not_answer_for_a_lease_is_told() {
    let plan = plan(2, 1);
    let mut world = World::joined(&plan);
    world.beats = false;
    // Behind a push, whose bytes a slow network may have yet to carry, it is not cut off for long.
    let push = world.push(&plan, 1);
    for link in [OWNER, 1] {
        world.give_push_slot(link, 1);
    }
    world.pass(Duration::from_secs(25));
    assert!(world.waits(push) && world.closed.is_empty());
    let times: Vec<u64> = world.progress.iter().map(|(at, _)| at.as_secs()).collect();
    assert_eq!(times, [10, 20]);
    let shards = |at: usize| world.progress[at].1.0.iter().map(|silent| silent.shard);
    assert!(shards(0).eq([shard(0), shard(1)]));
    let last = &world.progress[0].1.0[0].last;
    assert!(
        last.starts_with("connected, and unresponsive: no answer to a heartbeat for"),
        "{last}"
    );
}

#[test]
fn one_server_that_does_not_answer_is_told_though_others_do() {
    let plan = plan(2, 1);
    let mut world = World::joined(&plan);
    world.beats = false;
    let token = world.call(Command::Token);
    world.heard(OWNER, "TokenRequest");
    for _ in 0..10 {
        world.pass(Duration::from_secs(1));
        while !world.is_quiet(OWNER) {
            let beat = world.heard(OWNER, "Heartbeat");
            world.answer(&beat, message::HeartbeatAnswer {});
        }
    }
    assert!(world.waits(token));
    let [(_, silent)] = &world.progress[..] else { panic!("{:?}", world.progress) };
    assert_eq!(silent.0.iter().map(|silent| silent.shard).collect::<Vec<_>>(), [shard(1)]);
    // It answers again: nobody is silent.
    let beat = world.heard(1, "Heartbeat");
    world.answer(&beat, message::HeartbeatAnswer {});
    world.beats = true;
    world.pass(Duration::from_secs(25));
    assert_eq!(world.progress.len(), 1);
}

#[test]
fn what_a_server_says_that_waits_for_storage_is_told_until_it_goes_on() {
    let plan = plan(1, 1);
    let mut world = World::joined(&plan);
    world.beats = false;
    let push = world.call_within(
        Command::Push { order: order(&plan, Some(grant(1, 0)), 1) },
        Duration::from_secs(15),
    );
    world.give_push_slot(OWNER, 1);
    let cause = "cannot reserve space for /state/rows-1: no space left on device";
    let storage = || refused(Refusal::Storage { detail: Detail::clipped(cause) });
    let beats = |world: &mut World, stuck: bool| {
        for _ in 0..10 {
            world.pass(Duration::from_secs(1));
            while !world.is_quiet(OWNER) {
                let beat = world.heard(OWNER, "Heartbeat");
                match stuck {
                    true => world.answer(&beat, storage()),
                    false => world.answer(&beat, message::HeartbeatAnswer {}),
                }
            }
        }
    };
    beats(&mut world, true);
    let [(_, silent)] = &world.progress[..] else { panic!("{:?}", world.progress) };
    assert_eq!(silent.0[0].last, format!("connected, waits: {cause}"));
    beats(&mut world, true);
    let error = world.reply(push).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }) && error.to_string().contains(cause), "{error}");
    // The push is under way all the same, and nobody is told any more once there is space.
    beats(&mut world, false);
    let token = world.call(Command::Token);
    world.heard(OWNER, "TokenRequest");
    beats(&mut world, false);
    assert!(world.waits(token));
    assert_eq!(world.progress.len(), 1);
}

#[test]
fn intervals_without_end_are_no_intervals() {
    let mut world = World::with(|start| start.progress_interval = Some(Duration::MAX));
    let op = open(&mut world, 1, Duration::from_secs(60));
    world.pass(Duration::from_secs(59));
    assert!(world.waits(op) && world.progress.is_empty());
}

#[test]
fn pauses_grow_from_ten_milliseconds_to_a_second_and_start_anew_after_an_answer() {
    let mut world = World::new();
    open(&mut world, 1, Duration::from_secs(3600));
    let mut longest = Duration::ZERO;
    let mut pauses = std::collections::BTreeSet::new();
    for attempt in 0..60_u32 {
        world.cut(OWNER);
        let pause = world.wait_for_connect(OWNER);
        let ceiling = ms(10 << attempt.min(7)).min(Duration::from_secs(1));
        // The world looks every millisecond.
        assert!(pause <= ceiling + ms(1), "attempt {attempt}: {pause:?}");
        pauses.insert(pause);
        longest = longest.max(pause);
    }
    assert!(longest > ms(800), "{longest:?}");
    assert!(pauses.len() > 30, "they differ");
    // A welcome alone is not enough: a server may welcome and then break the protocol, for ever.
    let mut longest = Duration::ZERO;
    for _ in 0..10 {
        world.accept(OWNER);
        world.cut(OWNER);
        longest = longest.max(world.wait_for_connect(OWNER));
    }
    assert!(longest > ms(300), "{longest:?}");
    world.accept(OWNER);
    world.pass(Duration::from_secs(2));
    world.cut(OWNER);
    assert!(world.wait_for_connect(OWNER) <= ms(11), "it has answered heartbeats");
}

#[test]
fn servers_that_stop_or_are_full_are_tried_again() {
    let mut world = World::new();
    let op = open(&mut world, 1, Duration::from_secs(60));
    let full = Refusal::Busy { what: Detail::clipped("connections"), limit: 5 };
    for refusal in [Refusal::Stopping {}, full] {
        let hello = world.connect(OWNER);
        world.answer(&hello, refused(refusal));
        assert!(world.waits(op));
        world.wait_for_connect(OWNER);
    }
    world.accept(OWNER);
    world.reply(op).unwrap();
}

#[test]
fn other_refusals_of_a_hello_are_for_good() {
    let fenced = Refusal::Fenced { epoch: ClientEpoch(1), current: ClientEpoch(2) };
    for refusal in [fenced, Refusal::Denied {}, Refusal::Version { oldest: 7, newest: 9 }] {
        let mut world = World::new();
        let op = open(&mut world, 1, Duration::from_secs(60));
        let hello = world.connect(OWNER);
        world.answer(&hello, refused(refusal.clone()));
        match (world.reply(op).unwrap_err(), refusal) {
            (Error::Fenced, Refusal::Fenced { .. }) => {}
            (Error::Refused { refusal, shard: from, .. }, expected) => {
                assert_eq!((refusal, from), (expected, shard(0)));
            }
            (error, _) => panic!("{error}"),
        }
        world.pass(Duration::from_secs(60));
        assert!(world.connects.is_empty());
    }
}

#[test]
fn a_welcome_that_does_not_come_is_waited_for_five_seconds() {
    let mut world = World::new();
    let op = open(&mut world, 1, Duration::from_secs(60));
    world.connect(OWNER);
    world.pass(ms(4_999));
    assert!(world.closed.is_empty());
    world.pass(ms(1));
    assert_eq!(world.closed.get(&OWNER), Some(&1), "a stopped server is still connected");
    world.wait_for_connect(OWNER);
    // The first hello may have been heard: the epoch is asked for again, not another's taken.
    assert_eq!(world.accept(OWNER).client_epoch, ClientEpoch(0));
    world.reply(op).unwrap();
}

#[test]
fn a_server_that_comes_back_without_its_variables_ends_the_session() {
    for catalogue in [CatalogueState::Absent {}, CatalogueState::Declared { digest: [1; 32] }] {
        let mut world = World::joined(&plan(2, 4));
        world.cut(1);
        world.wait_for_connect(1);
        let token = world.call(Command::Token);
        let hello = world.connect(1);
        let Message::Hello(said) = &hello.message else { unreachable!() };
        assert!(said.catalogue.is_some() && said.seen_step == GlobalStep(0));
        world.answer(&hello, message::Welcome { catalogue, ..welcome() });
        assert_eq!(world.reply(token).unwrap_err(), Error::StateLost { shard: shard(1) });
    }
}

#[test]
fn requests_are_asked_again_until_they_are_answered() {
    let mut world = World::joined(&plan(1, 4));
    let (message, body) = (message::FetchCatalogue {}.into(), bytes::Bytes::new());
    let op = world.call(Command::Request { shard: shard(0), message, body });
    let first = world.heard(OWNER, "FetchCatalogue");
    assert!((59_000..60_000).contains(&first.envelope.deadline_ms));
    world.reconnect(OWNER);
    let second = world.heard(OWNER, "FetchCatalogue");
    let catalogue = message::CatalogueIs { digest: [0; 32] };
    world.announce(&second, GlobalStep(0), catalogue.clone(), 5);
    // The connection is lost after the header of the answer, before its body.
    world.reconnect(OWNER);
    let third = world.heard(OWNER, "FetchCatalogue");
    world.answer_body(&third, GlobalStep(0), catalogue, b"bytes");
    let Ok(Reply::Answer { body, .. }) = world.reply(op) else { panic!() };
    assert_eq!(body, b"bytes");
}
