//! Calls and fetches, and their answers.

use pushpull_common::protocol::message::{
    CancelCall, Described, Fetched, OutputPart, Refused, Release,
};
use pushpull_common::protocol::wire::List;
use pushpull_common::protocol::{Refusal, limits};

use super::*;
use crate::value::beyond_memory;

#[test]
fn a_call_is_sent_once_the_server_is_there_and_its_outputs_are_the_reply() {
    let mut world = world();
    assert!(world.connects.is_empty(), "nothing needs the link");
    let numbers: Vec<f32> = (0..262_200).map(|n| n as f32).collect();
    let value = Value::tensor(&[262_200], &numbers).unwrap();
    let op = world.call(order(std::slice::from_ref(&value)));
    let connection = world.accept(server(7, false));
    let sent: Vec<_> =
        world.sent.iter().map(|(_, e, m, b)| (m.name(), e.deadline_ms, b.len())).collect();
    let rest = numbers.len() * 4 - (1 << 20);
    // The server ends the call before this side would, so that its text arrives.
    assert_eq!(sent, [("Call", 9_900, 1 << 20), ("InputPart", 9_900, rest)]);
    let request = world.sent_calls()[0].0;
    // The answer has a value of two parts.
    let values = [("a", &Value::from(3_i64)), ("big", &value)];
    let bytes: Vec<u8> = [&3_i64.to_le_bytes()[..], value.as_bytes()].concat();
    world.session.answer_bytes_max = 2 << 20;
    let (first, second) = bytes.split_at(1 << 20);
    world.receive(connection, request, done(&values), first);
    assert!(world.replies.is_empty());
    world.receive(connection, request, OutputPart { offset: 1 << 20 }, second);
    let expected = values.map(|(name, value)| (name.to_owned(), value.clone())).to_vec();
    assert_eq!(world.reply(), (op, Ok(CallReply::Done(expected))));
}

#[test]
fn no_more_calls_are_sent_than_the_server_accepts() {
    let mut world = world();
    for _ in 0..3 {
        world.call(order(&[]));
    }
    let connection = world.accept(server(7, false));
    let calls = world.sent_calls();
    assert_eq!(calls.len(), 2);
    world.receive(connection, calls[0].0, done(&[]), &[]);
    let third = world.sent_calls();
    assert_eq!((third.len(), third[0].1.settled, third[0].1.ended.items()), (1, 1, &[1][..]));
}

#[test]
fn failures_are_errors_that_name_function_and_task() {
    let mut world = world();
    let outcome = |outcome| Message::from(CallEnded { outcome });
    let detail = || Text::clipped("no luck");
    let table: [(Message, &str); 4] = [
        (
            outcome(CallOutcome::Failed { retry: false, detail: detail() }),
            "cannot call \"f\": the function failed on /job:worker/task:2: no luck",
        ),
        (
            outcome(CallOutcome::Panicked { detail: detail() }),
            "cannot call \"f\": the function panicked on /job:worker/task:2: no luck",
        ),
        (outcome(CallOutcome::Cancelled {}), "cannot call \"f\": it was cancelled"),
        (
            Refused { refusal: Refusal::Depth { depth: 9, limit: 8 } }.into(),
            "cannot call \"f\": /job:worker/task:2 refuses: the call is nested in 9 others: the \
             limit is 8",
        ),
    ];
    let mut connection = None;
    for (answer, expected) in table {
        world.call(order(&[]));
        let connection = *connection.get_or_insert_with(|| world.accept(server(7, false)));
        let request = world.sent_calls()[0].0;
        world.receive(connection, request, answer, &[]);
        assert_eq!(world.error(), expected);
    }
}

#[test]
fn a_call_that_nobody_waits_for_is_cancelled() {
    let mut world = world();
    let op = world.call(order(&[]));
    let connection = world.accept(server(7, false));
    let request = world.sent_calls()[0].0;
    world.input(CallInput::Cancelled { op });
    let messages: Vec<Message> = world.sent.drain(..).map(|(_, _, message, _)| message).collect();
    let release = Release { calls: List::new(vec![1]).unwrap() };
    assert_eq!(messages, [CancelCall { call: 1 }.into(), release.into()]);
    world.receive(connection, request, done(&[]), &[]);
    assert!(world.replies.is_empty());
    // One that was not sent yet needs no message.
    let ops = [0; 3].map(|_| world.call(order(&[])));
    world.sent.clear();
    world.input(CallInput::Cancelled { op: ops[2] });
    assert!(world.sent.is_empty());
}

#[test]
fn the_server_learns_of_a_free_place_before_the_call_that_takes_it() {
    let mut world = world();
    let ops = [(); 3].map(|()| world.call(order(&[])));
    world.accept(server(7, false));
    assert_eq!(world.sent_calls().len(), 2, "the server has two places");
    world.input(CallInput::Cancelled { op: ops[0] });
    let sent: Vec<&str> = world.sent.iter().map(|(_, _, message, _)| message.name()).collect();
    assert_eq!(sent, ["CancelCall", "Release", "Call"]);
}

#[test]
fn outputs_that_stay_are_kept_alive_until_they_are_released() {
    let mut world = world();
    world.call(CallOrder { retain: true, ..order(&[]) });
    let connection = world.accept(server(7, false));
    let request = world.sent_calls()[0].0;
    let value = Value::from(3_i64);
    world.receive(connection, request, done(&[("v", &value)]), &[]);
    let kept = CallReply::Kept(vec![("v".to_owned(), value.value_type().clone())]);
    assert_eq!(world.reply().1, Ok(kept));
    // The link is made again, although nothing waits.
    world.breaks(connection);
    world.pass(Duration::from_millis(20));
    let connection = world.accept(server(7, true));
    world.pass(LEASE / 5);
    assert!(matches!(world.sent[..], [(_, _, Message::Heartbeat(_), _)]), "{:?}", world.sent);
    let link = world.link;
    let calls = vec![1];
    world.input(CallInput::Release { link, calls: calls.clone() });
    assert!(matches!(&world.sent[1].2, Message::Release(release) if release.calls.items() == [1]));
    world.input(CallInput::Release { link, calls });
    assert_eq!(world.sent.len(), 2, "released once");
    world.breaks(connection);
    world.pass(LEASE);
    assert!(world.connects.is_empty(), "nothing needs the link any more");
}

#[test]
fn fetches_and_descriptions_are_answered_with_values() {
    let mut world = world();
    let fetch = fetch(output_of(Incarnation(1), 3));
    world.command(fetch, None);
    let connection = world.accept(server(7, false));
    let (_, envelope, fetch, _) = world.sent.remove(0);
    assert!(matches!(fetch, Message::FetchOutput(_)) && envelope.deadline_ms == 0);
    let value = Value::from(9_i64);
    let fetched = Fetched { is: value.value_type().to_wire() };
    world.receive(connection, envelope.request, fetched, &9_i64.to_le_bytes());
    assert_eq!(world.reply().1, Ok(CallReply::Fetched(value)));
    world.command(CallCommand::Describe, None);
    let request = world.sent.remove(0).1.request;
    world.receive(connection, request, Described { bytes: 3 }, b"abc\0\0\0\0\0");
    let described = CallReply::Described(TaskId::worker(2), b"abc".to_vec());
    assert_eq!(world.reply().1, Ok(described));
    world.command(CallCommand::Describe, None);
    let request = world.sent.remove(0).1.request;
    let too_long = Described { bytes: limits::DESCRIPTION_BYTES_MAX + 1 };
    world.receive(connection, request, too_long, &[]);
    assert_eq!(
        world.error(),
        "cannot describe the server: /job:worker/task:2 has sent values of no type"
    );
}

#[test]
fn an_answer_beyond_the_limit_is_named_and_discarded() {
    let mut world = world();
    world.call(order(&[]));
    let connection = world.accept(server(7, false));
    let request = world.sent_calls()[0].0;
    let value = Value::zeros::<f64>(&[1 << 18]).unwrap();
    world.receive(connection, request, done(&[("v", &value)]), &vec![0; 1 << 20]);
    assert_eq!(
        world.error(),
        "cannot call \"f\": the answer of /job:worker/task:2 has 2097152 bytes: the limit is 1048576"
    );
    world.receive(connection, request, OutputPart { offset: 1 << 20 }, &vec![0; 1 << 20]);
    world.call(order(&[]));
    assert_eq!(world.sent_calls().len(), 1, "the connection goes on");
}

/// The limit of a client may allow more than the machine has.
#[test]
fn an_answer_that_the_system_has_no_memory_for_is_an_error() {
    let mut world = world_of(1 << 60);
    world.command(fetch(output_of(Incarnation(1), 3)), None);
    let connection = world.accept(server(7, false));
    let request = world.sent.remove(0).1.request;
    let fetched = Fetched { is: beyond_memory().to_wire() };
    world.receive(connection, request, fetched, &vec![0; 1 << 20]);
    let error = world.reply().1.unwrap_err();
    assert!(matches!(error, ServiceError::NoMemory { bytes, .. } if bytes == 1 << 51), "{error:?}");
    world.call(order(&[]));
    assert_eq!(world.sent_calls().len(), 1, "the connection goes on");
}

#[test]
fn a_fetched_output_is_received_only_if_it_is_admitted() {
    let value = Value::tensor(&[2], &[1.0_f32, 2.0]).unwrap();
    let refusal = Refusal::Memory { what: Text::clipped("the inputs"), bytes: 8, left: 0 };
    for refused in [false, true] {
        let mut world = world();
        let refusal = refusal.clone();
        let admits = move |bytes| {
            assert_eq!(bytes, 8);
            if refused { Err(refusal.clone()) } else { Ok(()) }
        };
        let of = output_of(Incarnation(1), 3);
        let admission = Some(Admission::new(admits));
        world.command(CallCommand::Fetch { of, admission }, None);
        let connection = world.accept(server(7, false));
        let request = world.sent.remove(0).1.request;
        let fetched = Fetched { is: value.value_type().to_wire() };
        world.receive(connection, request, fetched, value.as_bytes());
        match world.reply().1 {
            Ok(reply) => assert!(!refused && reply == CallReply::Fetched(value.clone())),
            Err(error) => assert!(refused && error.to_string().contains("the inputs"), "{error}"),
        }
    }
}

#[test]
fn fetches_beyond_the_places_of_the_server_are_held_back() {
    let mut world = world();
    let places = limits::PARKED_PER_CONNECTION_MAX;
    let ops: Vec<CallOp> =
        (0..places + 2).map(|_| world.command(fetch(output_of(Incarnation(1), 3)), None)).collect();
    let connection = world.accept(server(7, false));
    let taken = |world: &mut World| {
        let taken = std::mem::take(&mut world.sent);
        let name = |(_, envelope, message, _): (_, Envelope, Message, _)| {
            (envelope.request, message.name())
        };
        taken.into_iter().map(name).collect::<Vec<_>>()
    };
    let sent = taken(&mut world);
    assert_eq!(sent.len(), places);
    // One that nobody waits for leaves its place, once the server knows.
    world.input(CallInput::Cancelled { op: ops[3] });
    let next = RequestId(places as u64 + 1);
    assert_eq!(taken(&mut world), [(sent[3].0, "CancelCall"), (next, "FetchOutput")]);
    // Nothing is said of one that is answered or was not sent.
    let value = Value::scalar(2.0_f32);
    let fetched = Fetched { is: value.value_type().to_wire() };
    let mut body = value.as_bytes().to_vec();
    body.resize(8, 0);
    world.input(CallInput::Cancelled { op: ops[places + 1] });
    assert!(world.sent.is_empty());
    world.receive(connection, next, fetched, &body);
    assert_eq!(world.reply().0, ops[places]);
    world.input(CallInput::Cancelled { op: ops[places] });
    assert!(world.sent.is_empty());
    // Another connection begins with all places.
    world.breaks(connection);
    world.pass(Duration::from_millis(20));
    world.accept(server(7, true));
    assert_eq!(taken(&mut world).len(), places - 1);
}
