//! Links that break, and servers that come back, forget or change.

use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::{
    Goodbye, HeartbeatAnswer, Input, NamedInput, Refused, Released,
};

use super::*;

#[test]
fn a_call_goes_on_after_a_lost_connection_if_the_server_remembers_it() {
    let mut world = world();
    world.call(order(&[]));
    let connection = world.accept(server(7, false));
    let first = world.sent_calls();
    world.breaks(connection);
    assert!(world.replies.is_empty());
    world.pass(Duration::from_millis(20));
    let connection = world.accept(server(7, true));
    let again = world.sent_calls();
    assert_eq!((again[0].0, again[0].1.call), (first[0].0, first[0].1.call));
    world.receive(connection, again[0].0, done(&[]), &[]);
    assert_eq!(world.reply().1, Ok(CallReply::Done(Vec::new())));
}

#[test]
fn a_call_is_lost_with_the_memory_of_its_server() {
    for (incarnation, known) in [(8, false), (7, false), (8, true)] {
        let mut world = world();
        let lost = world.call(order(&[]));
        let connection = world.accept(server(7, false));
        world.sent.clear();
        // The first was sent, and the third was not.
        world.call(order(&[]));
        let unsent = world.call(order(&[]));
        world.sent.clear();
        world.breaks(connection);
        world.pass(Duration::from_millis(20));
        world.accept(server(incarnation, known));
        let ops: Vec<CallOp> = world.replies.iter().map(|(op, _)| *op).collect();
        assert!(ops.contains(&lost) && !ops.contains(&unsent), "{ops:?}");
        let error = world.replies[0].1.clone().unwrap_err();
        assert!(matches!(error, ServiceError::Lost { .. }), "{error}");
        assert_eq!(world.sent_calls().len(), 1, "the call that was not sent is sent");
    }
}

#[test]
fn a_call_may_end_with_its_connection() {
    let mut world = world();
    let ends = || CallOrder { ends_with_connection: true, ..order(&[]) };
    world.call(ends());
    let connection = world.accept(server(7, false));
    world.breaks(connection);
    assert_eq!(
        world.error(),
        "cannot call \"f\": /job:worker/task:2 was lost, reset; the function may have run"
    );
    world.call(ends());
    world.pass(Duration::from_millis(20));
    let (connection, _) = world.connects.pop().unwrap();
    world.breaks(connection);
    let error = world.error();
    assert!(error.contains("was not reached for"), "{error}");
}

#[test]
fn an_unreachable_server_is_named_at_the_deadline() {
    let mut world = world();
    world.call(order(&[]));
    for _ in 0..100 {
        if let Some((connection, _)) = world.connects.pop() {
            world.breaks(connection);
        }
        world.pass(Duration::from_millis(100));
    }
    assert_eq!(
        world.error(),
        "cannot call \"f\": /job:worker/task:2 was not reached for 10s: reset"
    );
    // The pauses between attempts grow, up to two seconds.
    assert!(world.session.next_connection < 20);
    world.pass(LEASE);
    assert!(world.connects.is_empty(), "nothing needs the link any more");
}

#[test]
fn a_server_that_does_not_answer_is_a_timeout() {
    let mut world = world();
    world.call(order(&[]));
    let connection = world.accept(server(7, false));
    world.sent.clear();
    world.pass(LEASE / 2);
    world.receive(connection, RequestId(0), HeartbeatAnswer {}, &[]);
    world.pass(LEASE / 2);
    assert_eq!(world.error(), "cannot call \"f\": waited 10s for the answer of /job:worker/task:2");
    let sent: Vec<&str> = world.sent.iter().map(|(_, _, message, _)| message.name()).collect();
    assert!(sent.contains(&"CancelCall"), "{sent:?}");
}

#[test]
fn a_silent_server_is_connected_again() {
    let mut world = world();
    let number = world.session.number_call();
    world.command(CallCommand::Call { number, order: Box::new(order(&[])) }, None);
    let connection = world.accept(server(7, false));
    world.pass(2 * LEASE + Duration::from_millis(1));
    assert_eq!(world.disconnects, [connection]);
    world.sent.clear();
    world.pass(Duration::from_millis(20));
    world.accept(server(7, true));
    assert_eq!(world.sent_calls().len(), 1);
    // The end of the old connection means nothing.
    world.breaks(connection);
    assert!(world.replies.is_empty());
}

#[test]
fn a_server_that_accepts_and_says_nothing_is_tried_again() {
    let mut world = world();
    world.call(order(&[]));
    let (first, _) = world.connects.pop().unwrap();
    world.input(CallInput::Connected { connection: first });
    assert_eq!(world.sent.pop().unwrap().2.name(), "Hello");
    world.pass(LEASE / 2 - Duration::from_millis(1));
    assert!(world.disconnects.is_empty());
    let wake_at = world.session.wake_at().unwrap();
    assert_eq!(wake_at, world.now + Duration::from_millis(1));
    world.pass(Duration::from_millis(1));
    assert_eq!(world.disconnects, [first]);
    world.pass(Duration::from_millis(20));
    let (second, _) = world.connects.pop().unwrap();
    // What the first connection still brings means nothing.
    world.receive(first, RequestId(u64::MAX), server(7, false), &[]);
    world.input(CallInput::Connected { connection: second });
    world.sent.clear();
    world.pass(LEASE / 2);
    let error = world.error();
    assert!(error.ends_with("was not reached for 5.02s: no welcome in 5s"), "{error}");
}

#[test]
fn another_task_at_the_address_is_named() {
    let mut world = world();
    world.call(order(&[]));
    let other = ServerIs { task: 3, ..server(7, false) };
    world.accept(other);
    assert_eq!(
        world.error(),
        "cannot call \"f\": the server at there:1 is /job:worker/task:3, not /job:worker/task:2"
    );
}

#[test]
fn a_server_that_stops_ends_its_calls() {
    let mut world = world();
    world.call(order(&[]));
    let connection = world.accept(server(7, false));
    world.receive(connection, RequestId(0), Goodbye {}, &[]);
    let error = world.error();
    assert!(error.contains("was lost, it has stopped"), "{error}");
}

/// Refuses the hello of the connection that the session has asked for.
fn refuse_hello(world: &mut World, refusal: Refusal) {
    let (connection, _) = world.connects.pop().unwrap();
    world.input(CallInput::Connected { connection });
    let request = world.sent.remove(0).1.request;
    world.receive(connection, request, Refused { refusal }, &[]);
}

#[test]
fn a_hello_that_is_refused_for_good_ends_the_calls() {
    let text = Text::clipped;
    let identity = Refusal::Identity {
        field: text("job"),
        server: text("a"),
        client: text("b"),
        server_hash: [1; 32],
        client_hash: [2; 32],
    };
    for refusal in [identity, Refusal::Role { role: 3, kind: 1 }] {
        let mut world = world();
        world.call(order(&[]));
        refuse_hello(&mut world, refusal.clone());
        let error = world.error();
        assert!(error.contains(&refusal.to_string()), "{error}");
    }
}

#[test]
fn a_refused_hello_is_tried_again() {
    let mut world = world();
    world.call(order(&[]));
    refuse_hello(&mut world, Refusal::Busy { what: Text::clipped("clients"), limit: 3 });
    assert!(world.replies.is_empty());
    world.pass(LEASE);
    let error = world.error();
    assert!(error.contains("too many clients: the limit is 3"), "{error}");
}

/// An order that needs the output of another call on the same server.
fn needs(call: u64) -> CallOrder {
    let input = Input::Output { job: Text::clipped("worker"), task: 2, of: output_of(OWN, call) };
    let named = NamedInput { name: Text::clipped("x"), input };
    CallOrder { inputs: CallInputs::of([named]).unwrap(), ..order(&[]) }
}

#[test]
fn a_call_that_needs_what_its_server_has_lost_is_refused() {
    let mut world = world();
    // The first call keeps the watermark of the session down.
    world.call(order(&[]));
    world.call(CallOrder { retain: true, ..order(&[]) });
    let connection = world.accept(server(7, false));
    let sent = world.sent_calls();
    let kept = sent[1].1.call;
    // It may be used before its call has ended, and after that.
    let early = world.call(needs(kept));
    world.input(CallInput::Cancelled { op: early });
    world.receive(connection, sent[1].0, done(&[]), &[]);
    assert!(matches!(world.reply().1, Ok(CallReply::Kept(_))));
    world.sent.clear();
    let op = world.call(needs(kept));
    assert!(world.replies.is_empty() && world.sent_calls()[0].1.call > kept);
    world.input(CallInput::Cancelled { op });
    // The server restarts.
    world.sent.clear();
    world.breaks(connection);
    world.pass(Duration::from_millis(20));
    world.accept(server(8, false));
    world.replies.clear();
    world.sent.clear();
    world.call(needs(kept));
    let error = world.reply().1.unwrap_err();
    let is_gone = |error: &ServiceError| matches!(error, ServiceError::Refused { refusal: Refusal::NoOutput { call, .. }, .. } if *call == kept);
    assert!(is_gone(&error), "{error}");
    assert!(world.sent_calls().is_empty());
}

/// The link of the world is to worker 2, and another one to worker 1.
#[test]
fn a_call_names_the_process_that_has_what_it_needs_from_another_task() {
    let mut world = world();
    let maker = world.link;
    let here = world.now;
    let elsewhere = Some(TaskId::worker(1));
    let user = world.session.add_link(here, "elsewhere:1".to_owned(), elsewhere);
    let server_of_user = ServerIs { task: 1, calls_max: 9, ..server(40, false) };
    let on = |world: &mut World, link, order| {
        world.link = link;
        world.call(order)
    };
    let holder = |world: &mut World| {
        let (_, call) = world.sent_calls().remove(0);
        match &call.inputs.items()[0].input {
            Input::Output { of, .. } => of.server,
            other => panic!("{other:?}"),
        }
    };
    on(&mut world, user, order(&[]));
    let to_user = world.accept(server_of_user);
    world.sent.clear();
    // The other server has not accepted the client, which cannot know what process it is.
    on(&mut world, maker, CallOrder { retain: true, ..order(&[]) });
    let kept = 2;
    on(&mut world, user, needs(kept));
    assert_eq!(holder(&mut world), Incarnation(0));
    let to_maker = world.accept(server(7, false));
    on(&mut world, user, needs(kept));
    let request = world.sent.iter().find(|(to, ..)| *to == to_maker).unwrap().1.request;
    world.sent.retain(|(to, ..)| *to == to_user);
    assert_eq!(holder(&mut world), Incarnation(7), "the call is under way there");
    world.receive(to_maker, request, done(&[]), &[]);
    on(&mut world, user, needs(kept));
    assert_eq!(holder(&mut world), Incarnation(7), "the call has ended there");
    // Of another client's output the caller says what it knows.
    let mut of_other = needs(kept);
    if let Input::Output { of, .. } = &mut of_other.inputs.items_mut()[0].input {
        of.owner = Incarnation(6);
    }
    on(&mut world, user, of_other);
    assert_eq!(holder(&mut world), Incarnation(0));
    // The other server restarts.
    world.breaks(to_maker);
    on(&mut world, user, needs(kept));
    assert_eq!(holder(&mut world), Incarnation(7), "its client does not know yet");
    world.pass(Duration::from_millis(20));
    world.accept(server(8, false));
    world.replies.clear();
    on(&mut world, user, needs(kept));
    let error = world.error();
    assert!(error.contains("its server has restarted"), "{error}");
    assert!(world.sent_calls().is_empty());
    // A fetch is refused as well.
    world.link = maker;
    world.command(fetch(output_of(OWN, kept)), None);
    assert!(world.error().contains("its server has restarted"));
}

#[test]
fn what_a_lost_call_may_leave_is_released() {
    let mut world = world();
    world.call(CallOrder { retain: true, ends_with_connection: true, ..order(&[]) });
    let connection = world.accept(server(7, false));
    let lost = world.sent_calls()[0].1.call;
    world.breaks(connection);
    assert!(matches!(world.reply().1, Err(ServiceError::Lost { .. })));
    // The server goes on with the call, and the next one makes the link again.
    world.call(order(&[]));
    world.pass(Duration::from_millis(20));
    world.accept(server(7, true));
    let released = world.sent.iter().find_map(|(_, _, message, _)| match message {
        Message::Release(release) => Some(release.calls.items().to_vec()),
        _ => None,
    });
    assert_eq!(released, Some(vec![lost]));
}

#[test]
fn what_a_broken_connection_may_have_lost_is_sent_again() {
    let mut world = world();
    let number = |world: &mut World| world.sent_calls()[0].1.call;
    world.call(CallOrder { retain: true, ..order(&[]) });
    let connection = world.accept(server(7, false));
    let request = world.sent[0].1.request;
    let kept = number(&mut world);
    world.receive(connection, request, done(&[]), &[]);
    world.call(order(&[]));
    let request = world.sent[0].1.request;
    let ended = number(&mut world);
    world.receive(connection, request, done(&[]), &[]);
    world.replies.clear();
    // A call acknowledges one, and a release names the other. The connection breaks.
    let calls = vec![kept];
    world.input(CallInput::Release { link: world.link, calls });
    world.sent.clear();
    world.call(order(&[]));
    assert_eq!(world.sent_calls()[0].1.ended.items(), [ended]);
    world.breaks(connection);
    world.pass(Duration::from_millis(20));
    let connection = world.accept(server(7, true));
    let sent = |world: &mut World| {
        let taken = std::mem::take(&mut world.sent);
        let ids = |message| match message {
            Message::Call(call) => call.ended.items().to_vec(),
            Message::Release(release) => release.calls.items().to_vec(),
            _ => Vec::new(),
        };
        let mut ids: Vec<u64> = taken.into_iter().flat_map(|(_, _, m, _)| ids(m)).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(sent(&mut world), [kept, ended]);
    // The server has received the release, but not the call.
    world.receive(connection, RequestId(0), Released {}, &[]);
    world.breaks(connection);
    world.pass(Duration::from_millis(40));
    world.accept(server(7, true));
    assert_eq!(sent(&mut world), [ended]);
}

/// The failure of a call stays on its server until the next call acknowledges it. So other clients
/// that fetch its outputs see it.
#[test]
fn a_call_that_has_failed_is_remembered_until_the_next_one() {
    let mut world = world();
    world.call(CallOrder { retain: true, ..order(&[]) });
    let connection = world.accept(server(7, false));
    let (request, call) = world.sent_calls().remove(0);
    let outcome = CallOutcome::Failed { retry: false, detail: Detail::clipped("no") };
    world.receive(connection, request, CallEnded { outcome }, &[]);
    assert!(matches!(world.reply().1, Err(ServiceError::Failed { .. })));
    assert!(world.sent.is_empty(), "{:?}", world.sent);
    world.call(order(&[]));
    assert_eq!(world.sent_calls()[0].1.ended.items(), [call.call]);
}
