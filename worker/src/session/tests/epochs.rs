//! Restore epochs: whom the session follows into one, and whom it leaves.

use std::time::Duration;

use bytes::Bytes;
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::protocol::message::{self, CatalogueState, Role, Welcome};
use pushpull_common::protocol::{Message, Refusal};

use super::world::{Frame, OWNER, World, ms, plan, refused, shard, welcome};
use crate::error::Error;
use crate::session::{Command, Input, OpId, Reply};

/// A welcome in an epoch that began at this step.
fn welcome_in(epoch: u32, step: u64) -> Welcome {
    let (restore_epoch, restored_step) = (RestoreEpoch(epoch), GlobalStep(step));
    Welcome { restore_epoch, restored_step, ..welcome() }
}

fn other_epoch(found: u32, current: u32, step: u64) -> Message {
    let (found, current) = (RestoreEpoch(found), RestoreEpoch(current));
    refused(Refusal::RestoreEpoch { found, current, step: GlobalStep(step) })
}

/// A session whose shards welcome it in these epochs, one link each.
fn opened(role: Role, epochs: &[u32]) -> World {
    let mut world = World::with(|start| start.role = role);
    let shards = (0..epochs.len() as u32).map(shard).collect();
    let open = world.call(Command::Open { shards });
    for (link, &epoch) in epochs.iter().enumerate() {
        welcomed(&mut world, link, welcome_in(epoch, 0));
    }
    world.reply(open).unwrap();
    world
}

/// A session that has joined two shards in epoch 3.
fn joined(role: Role) -> World {
    let mut world = opened(role, &[3, 3]);
    let join = world.call(Command::Joined { plan: plan(2, 4) });
    world.reply(join).unwrap();
    world
}

fn welcomed(world: &mut World, link: usize, welcome: Welcome) {
    world.wait_for_connect(link);
    let hello = world.connect(link);
    world.answer(&hello, welcome);
}

fn seen_epoch(hello: &Frame) -> RestoreEpoch {
    let Message::Hello(hello) = &hello.message else { panic!("{hello:?}") };
    hello.seen_epoch
}

fn request(world: &mut World, link: u32, message: impl Into<Message>) -> OpId {
    let (message, body) = (message.into(), Bytes::new());
    world.call(Command::Request { shard: shard(link), message, body })
}

/// Answers a pull of four floats, every byte of which is this.
fn values(world: &mut World, link: usize, step: u64, fill: u8) {
    let pull = world.heard(link, "Pull");
    let pulled = message::Pulled { version: 1, gradients: 1, offset: 0, last: true };
    let bytes = plan(2, 4).catalogue().layout(shard(link as u32)).bytes();
    world.answer_body(&pull, GlobalStep(step), pulled, &vec![fill; bytes as usize]);
}

#[test]
fn the_epoch_of_a_shard_is_in_every_request_and_once_joined_in_the_hello() {
    let mut world = opened(Role::Chief {}, &[2, 2, 0]);
    request(&mut world, 1, message::AwaitReady {});
    assert_eq!(world.heard(1, "AwaitReady").envelope.restore_epoch, RestoreEpoch(2));
    world.cut(1);
    world.wait_for_connect(1);
    assert_eq!(seen_epoch(&world.connect(1)), RestoreEpoch(0), "any will do");
    welcomed_again(&mut world);
    let join = world.call(Command::Joined { plan: plan(2, 4) });
    world.reply(join).unwrap();
    let plan = plan(2, 4);
    world.push(&plan, 1);
    let reserve = world.heard(1, "Reserve");
    assert_eq!(reserve.envelope.restore_epoch, RestoreEpoch(2));
    world.answer(&reserve, message::Reserved { push_slot: 1 });
    assert_eq!(world.heard(1, "PushPart").envelope.restore_epoch, RestoreEpoch(2));
    for (link, epoch) in [(OWNER, 2), (1, 2), (2, 0)] {
        world.cut(link);
        world.wait_for_connect(link);
        // The third holds none of the variables: it may have had no values ever.
        assert_eq!(seen_epoch(&world.connect(link)), RestoreEpoch(epoch));
    }
}

fn welcomed_again(world: &mut World) {
    world.cut(1);
    welcomed(world, 1, welcome_in(2, 0));
    world.sent.clear();
}

#[test]
fn a_member_that_has_joined_ends_when_a_shard_lives_in_another_epoch() {
    let empty = |epoch| Welcome { catalogue: CatalogueState::Absent {}, ..welcome_in(epoch, 0) };
    let back = Error::RolledBack { from_step: 9, to_step: 5 };
    let lost = Error::StateLost { shard: shard(1) };
    let table: &[(Message, &Error)] = &[
        (welcome_in(4, 5).into(), &back),
        (welcome_in(2, 5).into(), &lost),
        (empty(0).into(), &lost),
        (empty(3).into(), &lost),
        (other_epoch(3, 4, 5), &back),
        (other_epoch(3, 7, 5), &back),
        (other_epoch(3, 2, 5), &lost),
        (other_epoch(3, 0, 0), &lost),
    ];
    for role in [Role::Chief {}, Role::Worker {}] {
        for (said, expected) in table {
            // What is said to a hello.
            let mut world = at_step_nine(role);
            let waiting = [world.pull(&plan(2, 4)), world.push(&plan(2, 4), 1)];
            world.cut(1);
            world.wait_for_connect(1);
            let hello = world.connect(1);
            assert_eq!(seen_epoch(&hello), RestoreEpoch(3));
            world.answer(&hello, said.clone());
            has_ended(&mut world, &waiting, expected);

            // What is said to a request, and to a heartbeat.
            let Message::Refused(_) = said else { continue };
            let mut world = at_step_nine(role);
            let waiting = [world.pull(&plan(2, 4)), world.call(Command::Token)];
            let pull = world.heard(1, "Pull");
            world.answer(&pull, said.clone());
            has_ended(&mut world, &waiting, expected);

            let mut world = at_step_nine(role);
            world.beats = false;
            let waiting = [world.call(Command::Token)];
            world.pass(ms(1_000));
            let beat = world.heard(1, "Heartbeat");
            world.answer(&beat, said.clone());
            has_ended(&mut world, &waiting, expected);
        }
    }
}

/// A session that has joined in epoch 3 and has heard of step 9.
fn at_step_nine(role: Role) -> World {
    let mut world = joined(role);
    let token = world.call(Command::Token);
    let asked = world.heard(OWNER, "TokenRequest");
    let granted = message::Granted { grant: super::world::grant(1, 0) };
    world.answer_body(&asked, GlobalStep(9), granted, &[]);
    world.reply(token).unwrap();
    world
}

fn has_ended(world: &mut World, waiting: &[OpId], expected: &Error) {
    for &op in waiting {
        assert_eq!(&world.reply(op).unwrap_err(), expected);
    }
    let later = world.call(Command::Token);
    assert_eq!(&world.reply(later).unwrap_err(), expected);
    world.pass(Duration::from_secs(60));
    assert!(world.connects.is_empty() && world.sent.is_empty(), "it has given up");
}

#[test]
fn an_answer_from_another_epoch_is_not_looked_at() {
    let mut world = joined(Role::Worker {});
    let pull = world.pull(&plan(2, 4));
    world.epochs.insert(1, RestoreEpoch(4));
    let asked = world.heard(1, "Pull");
    let pulled = message::Pulled { version: 1, gradients: 1, offset: 0, last: true };
    world.announce(&asked, GlobalStep(0), pulled, 64);
    assert_eq!(world.closed.get(&1), Some(&1));
    assert!(world.waits(pull), "the step that the epoch began at is not known yet");
    world.wait_for_connect(1);
    let hello = world.connect(1);
    world.answer(&hello, other_epoch(3, 4, 2));
    let error = world.reply(pull).unwrap_err();
    assert_eq!(error, Error::RolledBack { from_step: 0, to_step: 2 });
}

#[test]
fn before_it_joins_a_session_follows_and_asks_again() {
    let mut world = opened(Role::Worker {}, &[3, 3]);
    let waits = request(&mut world, 1, message::AwaitReady {});
    let first = world.heard(1, "AwaitReady");
    assert_eq!(first.envelope.restore_epoch, RestoreEpoch(3));
    world.answer(&first, other_epoch(3, 4, 5));
    assert!(world.waits(waits));
    welcomed(&mut world, 1, welcome_in(4, 5));
    let second = world.heard(1, "AwaitReady");
    assert_eq!(second.envelope.restore_epoch, RestoreEpoch(4));
    world.answer(&second, message::Ready { digest: [1; 32] });
    assert!(matches!(world.reply(waits), Ok(Reply::Answer { .. })));
}

#[test]
fn the_step_falls_with_a_new_epoch_of_the_owner() {
    let mut world = opened(Role::Chief {}, &[3, 3]);
    let steps = |world: &World| world.session.step.0;
    let ask = request(&mut world, 0, message::FetchCatalogue {});
    let asked = world.heard(OWNER, "FetchCatalogue");
    world.answer_body(&asked, GlobalStep(40), message::CatalogueIs { digest: [0; 32] }, b"bytes");
    world.reply(ask).unwrap();
    assert_eq!(steps(&world), 40);
    // The chief has the owner restored over the same connection.
    let checkpoint = message::CheckpointId {
        name: pushpull_common::protocol::wire::Text::clipped("name"),
        epoch: RestoreEpoch(3),
        step: GlobalStep(30),
    };
    let restore = message::Restore { checkpoint, epoch: RestoreEpoch(4) };
    let restores = request(&mut world, 0, restore);
    let asked = world.heard(OWNER, "Restore");
    world.epochs.insert(OWNER, RestoreEpoch(4));
    world.answer_body(&asked, GlobalStep(30), message::Ready { digest: [0; 32] }, &[]);
    world.reply(restores).unwrap();
    assert_eq!(steps(&world), 30);
    assert!(world.closed.is_empty());
    request(&mut world, 0, message::AwaitReady {});
    assert_eq!(world.heard(OWNER, "AwaitReady").envelope.restore_epoch, RestoreEpoch(4));
}

#[test]
fn who_begins_an_epoch_that_has_passed_is_told() {
    let mut world = opened(Role::Chief {}, &[0, 0]);
    let op = request(&mut world, 0, message::Initialize { epoch: RestoreEpoch(1) });
    let asked = world.heard(OWNER, "Initialize");
    world.answer(&asked, other_epoch(1, 6, 0));
    let Err(Error::Refused { refusal: Refusal::RestoreEpoch { current, .. }, .. }) =
        world.reply(op)
    else {
        panic!()
    };
    assert_eq!(current, RestoreEpoch(6));
    assert!(world.closed.is_empty());
}

#[test]
fn a_heartbeat_that_crosses_the_beginning_of_an_epoch_does_no_harm() {
    let mut world = opened(Role::Chief {}, &[3, 3]);
    world.beats = false;
    world.pass(ms(1_000));
    let beat = world.heard(OWNER, "Heartbeat");
    let asked = request(&mut world, 0, message::AwaitReady {});
    let ready = world.heard(OWNER, "AwaitReady");
    world.epochs.insert(OWNER, RestoreEpoch(4));
    world.answer(&ready, message::Ready { digest: [0; 32] });
    world.reply(asked).unwrap();
    world.answer(&beat, other_epoch(3, 4, 0));
    assert!(world.closed.is_empty());
}

#[test]
fn joining_waits_until_all_shards_live_in_one_epoch() {
    let mut world = opened(Role::Worker {}, &[4, 3]);
    let join = world.call(Command::Joined { plan: plan(2, 4) });
    world.pass(Duration::from_secs(10));
    assert!(world.waits(join));
    // The chief restores the other as well.
    world.cut(1);
    welcomed(&mut world, 1, welcome_in(4, 0));
    assert!(matches!(world.reply(join), Ok(Reply::Done)));

    let mut world = opened(Role::Worker {}, &[4, 3]);
    let join = world.call_within(Command::Joined { plan: plan(2, 4) }, ms(2_000));
    world.pass(ms(2_000));
    let Err(Error::Timeout { awaited, doing, .. }) = world.reply(join) else { panic!() };
    assert_eq!((doing, awaited.0.len(), awaited.0[0].shard), ("join", 1, shard(1)));
    assert_eq!(awaited.0[0].last, "connected, has not been restored yet");
}

#[test]
fn joining_waits_for_connections_and_is_refused_by_a_shard_without_values() {
    let mut world = opened(Role::Worker {}, &[3, 3]);
    world.cut(1);
    let join = world.call(Command::Joined { plan: plan(2, 4) });
    assert!(world.waits(join));
    let empty = Welcome { catalogue: CatalogueState::Absent {}, ..welcome_in(0, 0) };
    welcomed(&mut world, 1, empty);
    let Err(Error::Refused { shard: by, refusal: Refusal::NotInitialized {}, .. }) =
        world.reply(join)
    else {
        panic!()
    };
    assert_eq!(by, shard(1));
    // It hears when they have come, and over the same connection.
    let waits = request(&mut world, 1, message::AwaitReady {});
    let asked = world.heard(1, "AwaitReady");
    world.epochs.insert(1, RestoreEpoch(3));
    world.answer(&asked, message::Ready { digest: [0; 32] });
    world.reply(waits).unwrap();
    let join = world.call(Command::Joined { plan: plan(2, 4) });
    world.reply(join).unwrap();
}

#[test]
fn a_reader_follows_and_mixes_no_values_of_two_epochs() {
    let mut world = joined(Role::Reader {});
    let plan = plan(2, 4);
    let pull = world.pull(&plan);
    values(&mut world, OWNER, 50, 1);
    // The second is restored before it has answered.
    world.cut(1);
    world.wait_for_connect(1);
    let hello = world.connect(1);
    assert_eq!(seen_epoch(&hello), RestoreEpoch(0), "a reader has nothing to go back with");
    world.answer(&hello, welcome_in(4, 30));
    values(&mut world, 1, 0, 2);
    assert!(world.waits(pull), "the owner's values are of an older epoch");
    assert!(world.is_quiet(OWNER), "and it has not been restored yet");
    world.cut(OWNER);
    welcomed(&mut world, OWNER, welcome_in(4, 30));
    values(&mut world, OWNER, 31, 2);
    let Ok(Reply::Pulled { buffer, read }) = world.reply(pull) else { panic!() };
    assert_eq!(read.step, GlobalStep(31), "not a step of the older epoch");
    assert!(buffer.bytes().iter().all(|&byte| byte == 2));
}

#[test]
fn a_reader_asks_again_where_it_is_refused_for_its_epoch() {
    let mut world = joined(Role::Reader {});
    let pull = world.pull(&plan(2, 4));
    for link in [OWNER, 1] {
        let asked = world.heard(link, "Pull");
        assert_eq!(asked.envelope.restore_epoch, RestoreEpoch(3));
        world.answer(&asked, other_epoch(3, 4, 30));
        welcomed(&mut world, link, welcome_in(4, 30));
    }
    for link in [OWNER, 1] {
        values(&mut world, link, 30, 2);
    }
    let Ok(Reply::Pulled { read, .. }) = world.reply(pull) else { panic!() };
    assert_eq!(read.step, GlobalStep(30));
    // So may its hello be, where it says one.
    world.cut(1);
    world.wait_for_connect(1);
    let hello = world.connect(1);
    world.answer(&hello, other_epoch(4, 5, 30));
    world.wait_for_connect(1);
}

#[test]
fn a_reader_waits_for_a_shard_that_comes_back_without_values() {
    let mut world = joined(Role::Reader {});
    let pull = world.pull(&plan(2, 4));
    values(&mut world, OWNER, 50, 1);
    world.cut(1);
    for _ in 0..3 {
        let catalogue = CatalogueState::Declared { digest: [0; 32] };
        welcomed(&mut world, 1, Welcome { catalogue, ..welcome_in(0, 0) });
        assert!(world.waits(pull) && world.is_quiet(1));
    }
    for link in [1, OWNER] {
        world.cut(link);
        welcomed(&mut world, link, welcome_in(4, 30));
    }
    for link in [1, OWNER] {
        values(&mut world, link, 30, 2);
    }
    assert!(matches!(world.reply(pull), Ok(Reply::Pulled { .. })));

    // Its deadline says what it has waited for.
    let pull = world.pull(&plan(2, 4));
    world.cut(1);
    let catalogue = CatalogueState::Absent {};
    welcomed(&mut world, 1, Welcome { catalogue, ..welcome_in(0, 0) });
    world.connects.clear();
    world.session.handle(world.now + Duration::from_secs(60), Input::Tick);
    world.now += Duration::from_secs(60);
    world.input(Input::Tick);
    let Err(Error::Timeout { awaited, .. }) = world.reply(pull) else { panic!() };
    let silent = awaited.0.iter().find(|silent| silent.shard == shard(1)).unwrap();
    assert_eq!(silent.last, "its variables have no values");
}

#[test]
fn a_save_is_asked_for_again_with_what_it_is_to_keep() {
    let mut world = joined(Role::Chief {});
    let (message, body) = (message::Save {}.into(), Bytes::from_static(b"epoch 3, row 5"));
    let save = world.call(Command::Request { shard: shard(0), message, body });
    assert_eq!(world.heard(OWNER, "Save").body, b"epoch 3, row 5");
    world.cut(OWNER);
    welcomed(&mut world, OWNER, welcome_in(3, 0));
    let again = world.heard(OWNER, "Save");
    assert_eq!(again.body, b"epoch 3, row 5");
    let checkpoint = message::CheckpointId {
        name: pushpull_common::protocol::wire::Text::clipped("name"),
        epoch: RestoreEpoch(3),
        step: GlobalStep(12),
    };
    world.answer(&again, message::Saved { checkpoint });
    assert!(matches!(world.reply(save), Ok(Reply::Answer { message: Message::Saved(_), .. })));
}
