//! Connecting: order, identity checks, back-off and error reports.

use std::time::Duration;

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep};
use pushpull_common::protocol::message::{CatalogueState, ModeIs, Role};
use pushpull_common::protocol::refusal::Detail;
use pushpull_common::protocol::{Message, Refusal, message};

use super::world::{OWNER, SessionWorld, grant, ms, order, plan, refused, shard, welcome};
use crate::error::Error;
use crate::session::{Expectations, ExpectedMode, Reply, SessionCommand};

fn open(world: &mut SessionWorld, tasks: u32, timeout: Duration) -> crate::session::OpId {
    world.call_within(SessionCommand::Open { shards: (0..tasks).map(shard).collect() }, timeout)
}

#[test]
fn the_owner_is_connected_first_and_gives_the_client_epoch() {
    let mut world = SessionWorld::new();
    let op = open(&mut world, 3, ms(60_000));
    assert_eq!(world.connects, [OWNER]);
    let hello = world.accept(OWNER);
    assert_eq!(hello.client_epoch, ClientEpoch(0));
    assert_eq!(world.connects, [1, 2]);
    assert_eq!(world.accept(1).client_epoch, ClientEpoch(3));
    assert!(world.is_pending(op));
    world.accept(2);
    assert!(matches!(world.reply(op), Ok(Reply::Opened(_))));
    world.reconnect(OWNER);
    world.disconnect(OWNER);
    world.wait_for_connect(OWNER);
    assert_eq!(world.accept(OWNER).client_epoch, ClientEpoch(3), "the same client, not a new one");
}

#[test]
fn a_reader_needs_no_epoch() {
    let mut world = SessionWorld::with(|config| config.role = Role::Reader {});
    open(&mut world, 2, ms(60_000));
    assert_eq!(world.connects, [0, 1]);
    world.accept(1);
    assert_eq!(world.accept(0).client_epoch, ClientEpoch(0));
}

#[test]
fn differing_identities_end_the_session_with_both_values() {
    let mut world = SessionWorld::new();
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
    let later = world.call(SessionCommand::Token);
    assert_eq!(world.reply(later).unwrap_err(), error, "later operations fail with the same error");
    world.advance(Duration::from_secs(600));
    assert!(world.connects.is_empty() && world.sent.is_empty(), "the session has ended");
}

#[test]
fn a_worker_that_expects_another_mode_or_last_step_ends_with_both_values() {
    let synchronous = ModeIs::Synchronous { replicas_to_aggregate: 2, total_num_replicas: 2 };
    let asynchronous = ModeIs::Asynchronous { owner_first: false };
    let expects = |mode, last_step| Expectations { mode, last_step, is_unclipped: false };
    let replicas = |aggregate, total| Some(ExpectedMode::Replicas { aggregate, total });
    let any = Some(ExpectedMode::Synchronous);
    let none = Some(ExpectedMode::Asynchronous);
    let two = "synchronous, 2 gradients of 2 replicas";
    // The servers' mode and last step, what the worker expects, and what differs.
    let cases = [
        (asynchronous, "none", expects(any, None), Some(("synchronous", "asynchronous"))),
        (synchronous, "none", expects(none, None), Some(("asynchronous", two))),
        (
            synchronous,
            "none",
            expects(replicas(1, 2), None),
            Some(("synchronous, 1 gradients of 2 replicas", two)),
        ),
        (asynchronous, "none", expects(replicas(2, 2), None), Some((two, "asynchronous"))),
        (synchronous, "none", expects(replicas(2, 2), None), None),
        (synchronous, "none", expects(None, Some(Some(100))), Some(("100", "none"))),
        (synchronous, "90", expects(None, Some(Some(100))), Some(("100", "90"))),
        (synchronous, "100", expects(any, Some(Some(100))), None),
        (asynchronous, "7", expects(None, None), None),
        (asynchronous, "7", expects(None, Some(None)), Some(("none", "7"))),
        (asynchronous, "none", expects(None, Some(None)), None),
    ];
    for (mode, last_step, expectations, differs) in cases {
        let mut world = SessionWorld::with(|config| config.expectations = expectations);
        let op = open(&mut world, 1, ms(60_000));
        let hello = world.connect(OWNER);
        let identity = Identity::new().with(Identity::LAST_STEP, last_step).to_wire();
        world.answer(&hello, message::Welcome { mode, identity, ..welcome() });
        let found = match world.reply(op) {
            Ok(_) => None,
            Err(Error::Unexpected { expected, found, .. }) => Some((expected, found)),
            Err(other) => panic!("{other}"),
        };
        let found = found.as_ref().map(|(expected, found)| (expected.as_str(), found.as_str()));
        assert_eq!(found, differs);
    }
}

#[test]
fn a_worker_that_expects_no_clipping_ends_at_servers_that_clip() {
    for (is_unclipped, clips, refused) in
        [(true, "by global norm", true), (true, "", false), (false, "by global norm", false)]
    {
        let expectations = Expectations { is_unclipped, ..Expectations::default() };
        let mut world = SessionWorld::with(|config| config.expectations = expectations);
        let op = open(&mut world, 1, ms(60_000));
        let hello = world.connect(OWNER);
        let identity = Identity::new().with("clips", clips).to_wire();
        world.answer(&hello, message::Welcome { identity, ..welcome() });
        let reply = world.reply(op);
        let is_refused = matches!(
            &reply,
            Err(Error::Unexpected { setting: "clips", expected, found, .. })
                if expected == "none" && found == clips
        );
        assert_eq!(is_refused, refused, "{reply:?}");
    }
}

#[test]
fn a_timeout_names_the_silent_shards_and_their_last_errors() {
    let mut world = SessionWorld::new();
    let op = open(&mut world, 2, ms(200));
    world.accept(OWNER);
    world.disconnect(1);
    world.advance(ms(199));
    assert!(world.is_pending(op));
    world.disconnect(1);
    world.advance(ms(1));
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
fn a_name_without_an_address_is_reported_at_once_and_tried_again() {
    let mut world = SessionWorld::new();
    let op = open(&mut world, 1, Duration::from_secs(300));
    world.unresolved(OWNER, "host0");
    assert_eq!(world.progress.len(), 1);
    let (at, report) = &world.progress[0];
    assert_eq!(at.as_secs(), 0);
    assert_eq!((report.0.len(), &*report.0[0].address), (1, "host0:1"));
    assert_eq!(report.0[0].last, "cannot resolve \"host0\"");
    world.advance(Duration::from_secs(5));
    world.unresolved(OWNER, "host0");
    assert_eq!(world.progress.len(), 1, "the same is repeated at the interval");
    world.advance(Duration::from_secs(5));
    assert_eq!(world.progress.len(), 2);
    world.accept(OWNER);
    world.reply(op).unwrap();
}

#[test]
fn progress_is_reported_at_the_interval_while_a_server_is_silent() {
    let mut world = SessionWorld::new();
    let op = open(&mut world, 2, Duration::from_secs(300));
    world.accept(OWNER);
    world.advance(Duration::from_secs(25));
    let times: Vec<u64> = world.progress.iter().map(|(at, _)| at.as_secs()).collect();
    assert_eq!(times, [10, 20]);
    assert_eq!(world.progress[0].1.0[0].shard, shard(1));
    assert_eq!(world.progress[0].1.0[0].last, "not connected yet");
    world.accept(1);
    world.reply(op).unwrap();
    let waits = world.call_within(SessionCommand::Token, Duration::from_secs(300));
    world.advance(Duration::from_secs(60));
    assert!(world.is_pending(waits) && world.progress.len() == 2, "no shard is silent");
    let request = world.next_frame(OWNER, "TokenRequest");
    world.answer(&request, message::Ended { reason: message::EndReason::Finished {} });
    world.reply(waits).unwrap();
    world.disconnect(1);
    world.advance(Duration::from_secs(9));
    let plan = plan(2, 1);
    let pull = world.pull(&plan);
    world.advance(Duration::from_secs(9));
    assert_eq!(world.progress.len(), 2, "the new operation has not waited for an interval");
    world.advance(Duration::from_secs(1));
    assert!(world.is_pending(pull) && world.progress.len() == 3);
}

#[test]
fn a_connected_server_without_an_answer_for_a_lease_is_reported() {
    let plan = plan(2, 1);
    let mut world = SessionWorld::joined(&plan);
    world.answers_heartbeats = false;
    // Behind a push the link is not reset for long: a slow network may still carry its bytes.
    let push = world.push(&plan, 1);
    for link in [OWNER, 1] {
        world.give_push_slot(link, 1);
    }
    world.advance(Duration::from_secs(25));
    assert!(world.is_pending(push) && world.closed.is_empty());
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
fn an_unresponsive_server_is_reported_while_others_answer() {
    let plan = plan(2, 1);
    let mut world = SessionWorld::joined(&plan);
    world.answers_heartbeats = false;
    let token = world.call(SessionCommand::Token);
    world.next_frame(OWNER, "TokenRequest");
    for _ in 0..10 {
        world.advance(Duration::from_secs(1));
        while !world.is_quiet(OWNER) {
            let beat = world.next_frame(OWNER, "Heartbeat");
            world.answer(&beat, message::HeartbeatAnswer {});
        }
    }
    assert!(world.is_pending(token));
    let [(_, silent)] = &world.progress[..] else { panic!("{:?}", world.progress) };
    assert_eq!(silent.0.iter().map(|silent| silent.shard).collect::<Vec<_>>(), [shard(1)]);
    // The server answers again, so no shard is silent.
    let beat = world.next_frame(1, "Heartbeat");
    world.answer(&beat, message::HeartbeatAnswer {});
    world.answers_heartbeats = true;
    world.advance(Duration::from_secs(25));
    assert_eq!(world.progress.len(), 1);
}

#[test]
fn a_server_blocked_on_storage_is_reported_until_it_continues() {
    let plan = plan(1, 1);
    let mut world = SessionWorld::joined(&plan);
    world.answers_heartbeats = false;
    let push = world.call_within(
        SessionCommand::Push { order: order(&plan, Some(grant(1, 0)), 1) },
        Duration::from_secs(15),
    );
    world.give_push_slot(OWNER, 1);
    let cause = "cannot reserve space for /state/rows-1: no space left on device";
    let storage = || refused(Refusal::Storage { detail: Detail::clipped(cause) });
    let answer_for_ten_seconds = |world: &mut SessionWorld, stuck: bool| {
        for _ in 0..10 {
            world.advance(Duration::from_secs(1));
            while !world.is_quiet(OWNER) {
                let beat = world.next_frame(OWNER, "Heartbeat");
                match stuck {
                    true => world.answer(&beat, storage()),
                    false => world.answer(&beat, message::HeartbeatAnswer {}),
                }
            }
        }
    };
    answer_for_ten_seconds(&mut world, true);
    let [(_, silent)] = &world.progress[..] else { panic!("{:?}", world.progress) };
    assert_eq!(silent.0[0].last, format!("connected, waits: {cause}"));
    answer_for_ten_seconds(&mut world, true);
    let error = world.reply(push).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }) && error.to_string().contains(cause), "{error}");
    // The push is still pending. Once there is space, progress reports stop.
    answer_for_ten_seconds(&mut world, false);
    let token = world.call(SessionCommand::Token);
    world.next_frame(OWNER, "TokenRequest");
    answer_for_ten_seconds(&mut world, false);
    assert!(world.is_pending(token));
    assert_eq!(world.progress.len(), 1);
}

#[test]
fn an_infinite_progress_interval_reports_nothing() {
    let mut world = SessionWorld::with(|config| config.progress_interval = Some(Duration::MAX));
    let op = open(&mut world, 1, Duration::from_secs(60));
    world.advance(Duration::from_secs(59));
    assert!(world.is_pending(op) && world.progress.is_empty());
}

#[test]
fn the_backoff_grows_from_ten_milliseconds_to_a_second_and_resets_after_an_answer() {
    let mut world = SessionWorld::new();
    open(&mut world, 1, Duration::from_secs(3600));
    let mut longest = Duration::ZERO;
    let mut pauses = std::collections::BTreeSet::new();
    for attempt in 0..60_u32 {
        world.disconnect(OWNER);
        let pause = world.wait_for_connect(OWNER);
        let ceiling = ms(10 << attempt.min(7)).min(Duration::from_secs(1));
        // The test checks every millisecond.
        assert!(pause <= ceiling + ms(1), "attempt {attempt}: {pause:?}");
        pauses.insert(pause);
        longest = longest.max(pause);
    }
    assert!(longest > ms(800), "{longest:?}");
    assert!(pauses.len() > 30, "pauses differ");
    // A welcome alone does not reset the back-off: a server may welcome and then break the protocol
    // each time.
    let mut longest = Duration::ZERO;
    for _ in 0..10 {
        world.accept(OWNER);
        world.disconnect(OWNER);
        longest = longest.max(world.wait_for_connect(OWNER));
    }
    assert!(longest > ms(300), "{longest:?}");
    world.accept(OWNER);
    world.advance(Duration::from_secs(2));
    world.disconnect(OWNER);
    assert!(world.wait_for_connect(OWNER) <= ms(11), "the server has answered heartbeats");
}

#[test]
fn stopping_and_full_servers_are_tried_again() {
    let mut world = SessionWorld::new();
    let op = open(&mut world, 1, Duration::from_secs(60));
    let full = Refusal::Busy { what: Detail::clipped("connections"), limit: 5 };
    for refusal in [Refusal::Stopping {}, full] {
        let hello = world.connect(OWNER);
        world.answer(&hello, refused(refusal));
        assert!(world.is_pending(op));
        world.wait_for_connect(OWNER);
    }
    world.accept(OWNER);
    world.reply(op).unwrap();
}

#[test]
fn other_refusals_of_a_hello_end_the_session() {
    let fenced = Refusal::Fenced { epoch: ClientEpoch(1), current: ClientEpoch(2) };
    for refusal in [fenced, Refusal::Denied {}, Refusal::Version { oldest: 7, newest: 9 }] {
        let mut world = SessionWorld::new();
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
        world.advance(Duration::from_secs(60));
        assert!(world.connects.is_empty());
    }
}

#[test]
fn a_missing_welcome_times_out_after_five_seconds() {
    let mut world = SessionWorld::new();
    let op = open(&mut world, 1, Duration::from_secs(60));
    world.connect(OWNER);
    world.advance(ms(4_999));
    assert!(world.closed.is_empty());
    world.advance(ms(1));
    assert_eq!(world.closed.get(&OWNER), Some(&1), "a stopped server is still connected");
    world.wait_for_connect(OWNER);
    // The first hello may have been received, so the session repeats it for the same epoch.
    assert_eq!(world.accept(OWNER).client_epoch, ClientEpoch(0));
    world.reply(op).unwrap();
}

#[test]
fn a_server_restarted_without_its_variables_ends_the_session() {
    for catalogue in [CatalogueState::Absent {}, CatalogueState::Declared { digest: [1; 32] }] {
        let mut world = SessionWorld::joined(&plan(2, 4));
        world.disconnect(1);
        world.wait_for_connect(1);
        let token = world.call(SessionCommand::Token);
        let hello = world.connect(1);
        let Message::Hello(greeting) = &hello.message else { unreachable!() };
        assert!(greeting.catalogue.is_some() && greeting.seen_step == GlobalStep(0));
        world.answer(&hello, message::Welcome { catalogue, ..welcome() });
        assert_eq!(world.reply(token).unwrap_err(), Error::StateLost { shard: shard(1) });
    }
}

#[test]
fn requests_are_repeated_until_they_are_answered() {
    let mut world = SessionWorld::joined(&plan(1, 4));
    let message = message::FetchCatalogue {}.into();
    let body = bytes::Bytes::new();
    let op = world.call(SessionCommand::Request { shard: shard(0), message, body, wait_ms: None });
    let first = world.next_frame(OWNER, "FetchCatalogue");
    assert!((59_000..60_000).contains(&first.envelope.deadline_ms));
    world.reconnect(OWNER);
    let second = world.next_frame(OWNER, "FetchCatalogue");
    let catalogue = message::CatalogueIs { digest: [0; 32] };
    world.answer_header(&second, GlobalStep(0), catalogue.clone(), 5);
    // The connection is lost between the header of the answer and its body.
    world.reconnect(OWNER);
    let third = world.next_frame(OWNER, "FetchCatalogue");
    world.answer_body(&third, GlobalStep(0), catalogue, b"bytes");
    let Ok(Reply::Answer { body, .. }) = world.reply(op) else { panic!() };
    assert_eq!(body, b"bytes");
}
