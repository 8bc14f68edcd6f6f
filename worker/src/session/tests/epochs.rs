//! Restore epochs: when the session follows a shard, and when it ends.

use std::time::Duration;

use bytes::Bytes;
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::protocol::message::{self, CatalogueState, Role, Welcome};
use pushpull_common::protocol::{Message, Refusal};

use super::world::{OWNER, SentFrame, SessionWorld, ms, plan, refused, shard, welcome};
use crate::error::Error;
use crate::session::{JoinedEpoch, OpId, Reply, SessionCommand, SessionInput};

/// Returns a welcome in an epoch that began at this step.
fn welcome_in(epoch: u32, step: u64) -> Welcome {
    let restore_epoch = RestoreEpoch(epoch);
    let restored_step = GlobalStep(step);
    Welcome { restore_epoch, restored_step, ..welcome() }
}

fn other_epoch(found: u32, current: u32, step: u64) -> Message {
    let found = RestoreEpoch(found);
    let current = RestoreEpoch(current);
    refused(Refusal::RestoreEpoch { found, current, step: GlobalStep(step) })
}

/// Opens a session whose shards welcome it in these epochs, one link each.
fn opened(role: Role, epochs: &[u32]) -> SessionWorld {
    let mut world = SessionWorld::with(|config| config.role = role);
    let shards = (0..epochs.len() as u32).map(shard).collect();
    let open = world.call(SessionCommand::Open { shards });
    for (link, &epoch) in epochs.iter().enumerate() {
        welcomed(&mut world, link, welcome_in(epoch, 0));
    }
    world.reply(open).unwrap();
    world
}

/// Starts a session that has joined two shards in epoch 3.
fn joined(role: Role) -> SessionWorld {
    let mut world = opened(role, &[3, 3]);
    let join = world.call(SessionCommand::Join { plan: plan(2, 4) });
    world.reply(join).unwrap();
    world
}

fn welcomed(world: &mut SessionWorld, link: usize, welcome: Welcome) {
    world.wait_for_connect(link);
    let hello = world.connect(link);
    world.answer(&hello, welcome);
}

fn seen_epoch(hello: &SentFrame) -> RestoreEpoch {
    let Message::Hello(hello) = &hello.message else { panic!("{hello:?}") };
    hello.seen_epoch
}

fn request(world: &mut SessionWorld, link: u32, message: impl Into<Message>) -> OpId {
    let message = message.into();
    let body = Bytes::new();
    world.call(SessionCommand::Request { shard: shard(link), message, body, wait_ms: None })
}

/// Answers a pull of four floats; every byte is `fill`.
fn values(world: &mut SessionWorld, link: usize, step: u64, fill: u8) {
    let pull = world.next_frame(link, "Pull");
    let pulled = message::Pulled { version: 1, gradients: 1, offset: 0, last: true };
    let bytes = plan(2, 4).catalogue().layout(shard(link as u32)).bytes();
    world.answer_body(&pull, GlobalStep(step), pulled, &vec![fill; bytes as usize]);
}

#[test]
fn requests_carry_the_epoch_of_the_shard_and_so_does_the_hello_after_joining() {
    let mut world = opened(Role::Chief {}, &[2, 2, 0]);
    request(&mut world, 1, message::AwaitReady {});
    assert_eq!(world.next_frame(1, "AwaitReady").envelope.restore_epoch, RestoreEpoch(2));
    world.disconnect(1);
    world.wait_for_connect(1);
    assert_eq!(seen_epoch(&world.connect(1)), RestoreEpoch(0), "any epoch is accepted");
    welcomed_again(&mut world);
    let join = world.call(SessionCommand::Join { plan: plan(2, 4) });
    world.reply(join).unwrap();
    let plan = plan(2, 4);
    world.push(&plan, 1);
    let reserve = world.next_frame(1, "Reserve");
    assert_eq!(reserve.envelope.restore_epoch, RestoreEpoch(2));
    world.answer(&reserve, message::Reserved { push_slot: 1 });
    assert_eq!(world.next_frame(1, "PushPart").envelope.restore_epoch, RestoreEpoch(2));
    for (link, epoch) in [(OWNER, 2), (1, 2), (2, 0)] {
        world.disconnect(link);
        world.wait_for_connect(link);
        // The third holds none of the variables, so it may never have had values.
        assert_eq!(seen_epoch(&world.connect(link)), RestoreEpoch(epoch));
    }
}

fn welcomed_again(world: &mut SessionWorld) {
    world.disconnect(1);
    welcomed(world, 1, welcome_in(2, 0));
    world.sent.clear();
}

#[test]
fn a_joined_member_ends_when_a_shard_is_in_another_epoch() {
    let empty = |epoch| Welcome { catalogue: CatalogueState::Absent {}, ..welcome_in(epoch, 0) };
    let back = Error::RolledBack { from_step: 9, to_step: 5 };
    let lost = Error::StateLost { shard: shard(1) };
    let table: &[(Message, &Error)] = &[
        (welcome_in(4, 5).into(), &back),
        (welcome_in(2, 5).into(), &back),
        (Welcome { arena: 2, ..welcome_in(3, 5) }.into(), &back),
        (Welcome { arena: 2, ..welcome_in(4, 5) }.into(), &back),
        (empty(0).into(), &lost),
        (empty(3).into(), &lost),
        (other_epoch(3, 4, 5), &back),
        (other_epoch(3, 7, 5), &back),
        (other_epoch(3, 2, 5), &back),
        (other_epoch(3, 0, 0), &lost),
    ];
    for role in [Role::Chief {}, Role::Worker {}] {
        for (answer, expected) in table {
            // In answer to a hello.
            let mut world = at_step_nine(role);
            let waiting = [world.pull(&plan(2, 4)), world.push(&plan(2, 4), 1)];
            world.disconnect(1);
            world.wait_for_connect(1);
            let hello = world.connect(1);
            assert_eq!(seen_epoch(&hello), RestoreEpoch(3));
            world.answer(&hello, answer.clone());
            has_ended(&mut world, &waiting, expected);

            // In answer to a request, and to a heartbeat.
            let Message::Refused(_) = answer else { continue };
            let mut world = at_step_nine(role);
            let waiting = [world.pull(&plan(2, 4)), world.call(SessionCommand::Token)];
            let pull = world.next_frame(1, "Pull");
            world.answer(&pull, answer.clone());
            has_ended(&mut world, &waiting, expected);

            let mut world = at_step_nine(role);
            world.answers_heartbeats = false;
            let waiting = [world.call(SessionCommand::Token)];
            world.advance(ms(1_000));
            let beat = world.next_frame(1, "Heartbeat");
            world.answer(&beat, answer.clone());
            has_ended(&mut world, &waiting, expected);
        }
    }
}

/// Starts a session that has joined in epoch 3 and knows of step 9.
fn at_step_nine(role: Role) -> SessionWorld {
    let mut world = joined(role);
    let token = world.call(SessionCommand::Token);
    let asked = world.next_frame(OWNER, "TokenRequest");
    let granted = message::Granted { grant: super::world::grant(1, 0) };
    world.answer_body(&asked, GlobalStep(9), granted, &[]);
    world.reply(token).unwrap();
    world
}

fn has_ended(world: &mut SessionWorld, waiting: &[OpId], expected: &Error) {
    for &op in waiting {
        assert_eq!(&world.reply(op).unwrap_err(), expected);
    }
    let later = world.call(SessionCommand::Token);
    assert_eq!(&world.reply(later).unwrap_err(), expected);
    world.advance(Duration::from_secs(60));
    assert!(world.connects.is_empty() && world.sent.is_empty(), "the session has ended");
}

#[test]
fn an_answer_from_another_epoch_is_ignored() {
    let mut world = joined(Role::Worker {});
    let pull = world.pull(&plan(2, 4));
    world.epochs.insert(1, RestoreEpoch(4));
    let asked = world.next_frame(1, "Pull");
    let pulled = message::Pulled { version: 1, gradients: 1, offset: 0, last: true };
    world.answer_header(&asked, GlobalStep(0), pulled, 64);
    assert_eq!(world.closed.get(&1), Some(&1));
    assert!(world.is_pending(pull), "the first step of the epoch is not known yet");
    world.wait_for_connect(1);
    let hello = world.connect(1);
    world.answer(&hello, other_epoch(3, 4, 2));
    let error = world.reply(pull).unwrap_err();
    assert_eq!(error, Error::RolledBack { from_step: 0, to_step: 2 });
}

#[test]
fn a_session_that_has_not_joined_follows_and_repeats_its_requests() {
    let mut world = opened(Role::Worker {}, &[3, 3]);
    let waits = request(&mut world, 1, message::AwaitReady {});
    let first = world.next_frame(1, "AwaitReady");
    assert_eq!(first.envelope.restore_epoch, RestoreEpoch(3));
    world.answer(&first, other_epoch(3, 4, 5));
    assert!(world.is_pending(waits));
    welcomed(&mut world, 1, welcome_in(4, 5));
    let second = world.next_frame(1, "AwaitReady");
    assert_eq!(second.envelope.restore_epoch, RestoreEpoch(4));
    world.answer(&second, message::Ready { digest: [1; 32] });
    assert!(matches!(world.reply(waits), Ok(Reply::Answer { .. })));
}

#[test]
fn the_step_falls_when_the_owner_begins_a_new_epoch() {
    let mut world = opened(Role::Chief {}, &[3, 3]);
    let steps = |world: &SessionWorld| world.session.membership.step.0;
    let ask = request(&mut world, 0, message::FetchCatalogue {});
    let asked = world.next_frame(OWNER, "FetchCatalogue");
    world.answer_body(&asked, GlobalStep(40), message::CatalogueIs { digest: [0; 32] }, b"bytes");
    world.reply(ask).unwrap();
    assert_eq!(steps(&world), 40);
    // The chief restores the owner over the same connection.
    let checkpoint = message::CheckpointId {
        name: pushpull_common::protocol::wire::Text::clipped("name"),
        epoch: RestoreEpoch(3),
        step: GlobalStep(30),
    };
    let restore = message::Restore { checkpoint, epoch: RestoreEpoch(4) };
    let restores = request(&mut world, 0, restore);
    let asked = world.next_frame(OWNER, "Restore");
    world.epochs.insert(OWNER, RestoreEpoch(4));
    world.answer_body(&asked, GlobalStep(30), message::Ready { digest: [0; 32] }, &[]);
    world.reply(restores).unwrap();
    assert_eq!(steps(&world), 30);
    assert!(world.closed.is_empty());
    request(&mut world, 0, message::AwaitReady {});
    assert_eq!(world.next_frame(OWNER, "AwaitReady").envelope.restore_epoch, RestoreEpoch(4));
}

#[test]
fn a_request_to_begin_a_past_epoch_is_refused() {
    let mut world = opened(Role::Chief {}, &[0, 0]);
    let op = request(&mut world, 0, message::Initialize { epoch: RestoreEpoch(1) });
    let asked = world.next_frame(OWNER, "Initialize");
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
fn a_heartbeat_in_flight_when_an_epoch_begins_is_harmless() {
    let mut world = opened(Role::Chief {}, &[3, 3]);
    world.answers_heartbeats = false;
    world.advance(ms(1_000));
    let beat = world.next_frame(OWNER, "Heartbeat");
    let asked = request(&mut world, 0, message::AwaitReady {});
    let ready = world.next_frame(OWNER, "AwaitReady");
    world.epochs.insert(OWNER, RestoreEpoch(4));
    world.answer(&ready, message::Ready { digest: [0; 32] });
    world.reply(asked).unwrap();
    world.answer(&beat, other_epoch(3, 4, 0));
    assert!(world.closed.is_empty());
}

#[test]
fn joining_waits_until_all_shards_are_in_one_epoch() {
    let mut world = opened(Role::Worker {}, &[4, 3]);
    let join = world.call(SessionCommand::Join { plan: plan(2, 4) });
    world.advance(Duration::from_secs(10));
    assert!(world.is_pending(join));
    // The chief restores the other shard too.
    world.disconnect(1);
    welcomed(&mut world, 1, welcome_in(4, 0));
    assert!(matches!(
        world.reply(join),
        Ok(Reply::Joined(JoinedEpoch { epoch: RestoreEpoch(4), arena: 1 }))
    ));

    let mut world = opened(Role::Worker {}, &[4, 3]);
    let join = world.call_within(SessionCommand::Join { plan: plan(2, 4) }, ms(2_000));
    world.advance(ms(2_000));
    let Err(Error::Timeout { awaited, doing, .. }) = world.reply(join) else { panic!() };
    assert_eq!((doing, awaited.0.len(), awaited.0[0].shard), ("join", 1, shard(1)));
    assert_eq!(awaited.0[0].last, "connected, has not been restored yet");
}

#[test]
fn joining_waits_for_connections_and_is_refused_by_a_shard_without_values() {
    let mut world = opened(Role::Worker {}, &[3, 3]);
    world.disconnect(1);
    let join = world.call(SessionCommand::Join { plan: plan(2, 4) });
    assert!(world.is_pending(join));
    let empty = Welcome { catalogue: CatalogueState::Absent {}, ..welcome_in(0, 0) };
    welcomed(&mut world, 1, empty);
    let Err(Error::Refused { shard: by, refusal: Refusal::NotInitialized {}, .. }) =
        world.reply(join)
    else {
        panic!()
    };
    assert_eq!(by, shard(1));
    // The values are announced over the same connection.
    let waits = request(&mut world, 1, message::AwaitReady {});
    let asked = world.next_frame(1, "AwaitReady");
    world.epochs.insert(1, RestoreEpoch(3));
    world.answer(&asked, message::Ready { digest: [0; 32] });
    world.reply(waits).unwrap();
    let join = world.call(SessionCommand::Join { plan: plan(2, 4) });
    world.reply(join).unwrap();
}

// W-4.
#[test]
fn a_reader_follows_and_never_mixes_values_of_two_epochs() {
    let mut world = joined(Role::Reader {});
    let plan = plan(2, 4);
    let pull = world.pull(&plan);
    values(&mut world, OWNER, 50, 1);
    // The second is restored before it has answered.
    world.disconnect(1);
    world.wait_for_connect(1);
    let hello = world.connect(1);
    assert_eq!(seen_epoch(&hello), RestoreEpoch(0), "a reader accepts any epoch");
    world.answer(&hello, welcome_in(4, 30));
    values(&mut world, 1, 0, 2);
    assert!(world.is_pending(pull), "the owner's values are of an older epoch");
    assert!(world.is_quiet(OWNER), "the owner has not been restored yet");
    world.disconnect(OWNER);
    welcomed(&mut world, OWNER, welcome_in(4, 30));
    values(&mut world, OWNER, 31, 2);
    let Ok(Reply::Pulled { buffer, read }) = world.reply(pull) else { panic!() };
    assert_eq!(read.step, GlobalStep(31), "the step is of the new epoch");
    assert!(buffer.bytes().iter().all(|&byte| byte == 2));
}

#[test]
fn a_member_names_the_state_that_it_has_joined_and_learns_of_another_of_the_same_epoch() {
    let mut world = at_step_nine(Role::Worker {});
    let waiting = [world.pull(&plan(2, 4)), world.push(&plan(2, 4), 1)];
    world.disconnect(1);
    world.wait_for_connect(1);
    let hello = world.connect(1);
    let Message::Hello(seen) = &hello.message else { panic!("{hello:?}") };
    assert_eq!((seen.seen_epoch, seen.seen_arena), (RestoreEpoch(3), 1));
    // The state was lost, and the epoch of the restored one has the same number.
    world.answer(&hello, other_epoch(3, 3, 5));
    has_ended(&mut world, &waiting, &Error::RolledBack { from_step: 9, to_step: 5 });
}

#[test]
fn a_reader_never_mixes_values_of_two_states_of_one_epoch() {
    let mut world = joined(Role::Reader {});
    let plan = plan(2, 4);
    let pull = world.pull(&plan);
    values(&mut world, OWNER, 50, 1);
    // All state was lost and restored as the same epoch. The reader first sees the second shard.
    world.disconnect(1);
    welcomed(&mut world, 1, Welcome { arena: 2, ..welcome_in(3, 30) });
    assert_eq!(world.closed.get(&OWNER), Some(&1), "the owner is to say which state it has");
    values(&mut world, 1, 0, 2);
    assert!(world.is_pending(pull), "the owner's values are of the state that was lost");
    welcomed(&mut world, OWNER, Welcome { arena: 2, ..welcome_in(3, 30) });
    values(&mut world, OWNER, 31, 2);
    // The welcome of the owner has had the other shard asked again.
    welcomed(&mut world, 1, Welcome { arena: 2, ..welcome_in(3, 30) });
    values(&mut world, 1, 0, 2);
    let Ok(Reply::Pulled { buffer, .. }) = world.reply(pull) else { panic!() };
    assert!(buffer.bytes().iter().all(|&byte| byte == 2));
}

#[test]
fn a_reader_repeats_a_pull_refused_for_its_epoch() {
    let mut world = joined(Role::Reader {});
    let pull = world.pull(&plan(2, 4));
    for link in [OWNER, 1] {
        let asked = world.next_frame(link, "Pull");
        assert_eq!(asked.envelope.restore_epoch, RestoreEpoch(3));
        world.answer(&asked, other_epoch(3, 4, 30));
        welcomed(&mut world, link, welcome_in(4, 30));
    }
    for link in [OWNER, 1] {
        values(&mut world, link, 30, 2);
    }
    let Ok(Reply::Pulled { read, .. }) = world.reply(pull) else { panic!() };
    assert_eq!(read.step, GlobalStep(30));
    // The hello may be refused for its epoch too.
    world.disconnect(1);
    world.wait_for_connect(1);
    let hello = world.connect(1);
    world.answer(&hello, other_epoch(4, 5, 30));
    world.wait_for_connect(1);
}

#[test]
fn a_reader_waits_for_a_shard_that_restarts_without_values() {
    let mut world = joined(Role::Reader {});
    let pull = world.pull(&plan(2, 4));
    values(&mut world, OWNER, 50, 1);
    world.disconnect(1);
    for _ in 0..3 {
        let catalogue = CatalogueState::Declared { digest: [0; 32] };
        welcomed(&mut world, 1, Welcome { catalogue, ..welcome_in(0, 0) });
        assert!(world.is_pending(pull) && world.is_quiet(1));
    }
    for link in [1, OWNER] {
        world.disconnect(link);
        welcomed(&mut world, link, welcome_in(4, 30));
    }
    for link in [1, OWNER] {
        values(&mut world, link, 30, 2);
    }
    assert!(matches!(world.reply(pull), Ok(Reply::Pulled { .. })));

    // The timeout names the cause of the wait.
    let pull = world.pull(&plan(2, 4));
    world.disconnect(1);
    let catalogue = CatalogueState::Absent {};
    welcomed(&mut world, 1, Welcome { catalogue, ..welcome_in(0, 0) });
    world.connects.clear();
    world.session.handle(world.now + Duration::from_secs(60), SessionInput::Tick);
    world.now += Duration::from_secs(60);
    world.input(SessionInput::Tick);
    let Err(Error::Timeout { awaited, .. }) = world.reply(pull) else { panic!() };
    let silent = awaited.0.iter().find(|silent| silent.shard == shard(1)).unwrap();
    assert_eq!(silent.last, "its variables have no values");
}

#[test]
fn a_save_is_repeated_with_its_user_data() {
    let mut world = joined(Role::Chief {});
    let message = message::Save {}.into();
    let body = Bytes::from_static(b"epoch 3, row 5");
    let save =
        world.call(SessionCommand::Request { shard: shard(0), message, body, wait_ms: None });
    assert_eq!(world.next_frame(OWNER, "Save").body, b"epoch 3, row 5");
    world.disconnect(OWNER);
    welcomed(&mut world, OWNER, welcome_in(3, 0));
    let again = world.next_frame(OWNER, "Save");
    assert_eq!(again.body, b"epoch 3, row 5");
    let checkpoint = message::CheckpointId {
        name: pushpull_common::protocol::wire::Text::clipped("name"),
        epoch: RestoreEpoch(3),
        step: GlobalStep(12),
    };
    world.answer(&again, message::Saved { checkpoint });
    assert!(matches!(world.reply(save), Ok(Reply::Answer { message: Message::Saved(_), .. })));
}
