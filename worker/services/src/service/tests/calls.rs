//! Calls: their arrival, their run and their end.

use pushpull_common::protocol::limits::CALL_DEPTH_MAX;
use pushpull_common::protocol::message::{CallEnded, CallOutcome, CancelCall, InputPart, Release};
use pushpull_common::protocol::wire::List;

use super::*;

fn outcome(world: &mut World) -> CallOutcome {
    match world.answer() {
        (_, Message::CallEnded(CallEnded { outcome })) => outcome,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_call_runs_and_its_outputs_are_sent() {
    let mut world = world();
    let (connection, known) = world.connect(1);
    assert!(!known);
    let x = Value::tensor(&[2], &[1.0_f32, 2.0]).unwrap();
    let mut body = Vec::new();
    body.extend_from_slice(x.as_bytes());
    world.send_within(connection, 5, call_with(1, "typed", &[&x]), 0, &body);
    let order = world.order();
    assert_eq!((&order.function[..], order.call, order.device), ("typed", 1, 0));
    assert_eq!(order.inputs, [("x".to_owned(), InputSource::Value(x))]);
    world.returns(order.execution, 3.0_f32);
    let (_, request, message, body) = world.sent.remove(0);
    assert_eq!((request.0, body.len()), (5, 8), "padded to 8 bytes");
    let Message::CallEnded(CallEnded { outcome: CallOutcome::Done { outputs } }) = message else {
        panic!("{message:?}");
    };
    assert_eq!(outputs.items()[0].name.as_str(), "value");
}

// F-1, F-3.
#[test]
fn a_number_is_executed_once() {
    let mut world = world();
    let (first, _) = world.connect(1);
    world.send(first, 5, call(1, "f"));
    let order = world.order();
    // The client has lost its connection and asks again, while the function runs.
    world.input(ServiceInput::Disconnected { connection: first });
    let (second, known) = world.connect(1);
    assert!(known);
    world.send(second, 6, call(1, "f"));
    assert!(world.orders.is_empty() && world.sent.is_empty());
    world.returns(order.execution, 1_i64);
    assert_eq!(world.answer().0, 6, "the newer request is answered");
    // And after it has ended.
    let (third, _) = world.connect(1);
    assert_eq!(world.closed, [second]);
    world.send(third, 7, call(1, "f"));
    assert!(world.orders.is_empty());
    assert!(matches!(outcome(&mut world), CallOutcome::Done { .. }));
    // The client has the answer; then the number is refused.
    world.send(third, 8, Call { settled: 1, ..call(2, "f") });
    world.send(third, 9, call(1, "f"));
    assert_eq!(world.refusal(), Refusal::Settled { call: 1, settled: 1 });
}

/// The budget of a client may allow more than the machine has.
// F-2.
#[test]
fn inputs_that_the_system_has_no_memory_for_are_refused() {
    let mut world = world_of(|config| {
        config.bytes_max = 1 << 60;
        config.total_bytes_max = 1 << 60;
    });
    let (connection, _) = world.connect(1);
    let name = Text::clipped("x");
    let input = NamedInput { name, input: Input::Value { is: beyond_memory().to_wire() } };
    let inputs = CallInputs::of([input]).unwrap();
    world.send(connection, 5, Call { inputs, ..call(1, "f") });
    let what = Text::clipped("the inputs, for which the system has no memory,");
    let bytes = beyond_memory().bytes();
    assert_eq!(world.refusal(), Refusal::Memory { what, bytes, left: 0 });
    // The refused call takes no memory of the budget, and its number is free.
    world.send(connection, 6, call(1, "f"));
    assert_eq!(world.order().call, 1);
    assert_eq!(world.service.clients.bytes(), 0);
}

// F-2.
#[test]
fn bad_calls_are_refused_before_anything_runs() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    let wide = Value::zeros::<f32>(&[3]).unwrap();
    let pair = Value::zeros::<f32>(&[2]).unwrap();
    let huge = Value::zeros::<f32>(&[2 << 20]).unwrap();
    let on = |device: &str| Call { device: Text::clipped(device), ..call(1, "f") };
    let twice = {
        let named = call_with(1, "f", &[&pair]).inputs.items()[0].clone();
        Call { inputs: CallInputs::of([named.clone(), named]).unwrap(), ..call(1, "f") }
    };
    let table: [(Call, &str); 11] = [
        (call(1, "g"), "no function is named \"g\": there are async, f, typed"),
        (on("/gpu:0"), "there is no device \"/gpu:0\""),
        (on("/job:worker/task:0"), "this server is /job:worker/task:1"),
        (on("/task:x"), "there is no device \"/task:x\""),
        (Call { depth: CALL_DEPTH_MAX + 1, ..call(1, "f") }, "nested in 9 others: the limit is 8"),
        (call(1, "typed"), "input \"x\" does not suit function \"typed\": it is missing"),
        (call_with(1, "typed", &[&wide]), "it is f32 [3], not f32 [2]"),
        (call_with(1, "typed", &[&pair, &pair]), "the function has none of this name"),
        (twice, "it is given twice"),
        (
            call_with(1, "f", &[&huge]),
            "input \"x\" does not suit function \"f\": the inputs need 8388608 bytes, and a client \
             may use 4194304 on this server",
        ),
        (
            call_with(1, "f", &[&pair, &huge]),
            "input \"y\" does not suit function \"f\": the inputs",
        ),
    ];
    for (call, expected) in table {
        world.send(connection, 5, call);
        let refusal = world.refusal().to_string();
        assert!(refusal.contains(expected), "{refusal}");
    }
    assert!(world.orders.is_empty());
    world.send(connection, 6, call(0, "f"));
    assert_eq!(world.refusal(), Refusal::Settled { call: 0, settled: 0 });
}

#[test]
fn inputs_arrive_in_parts_that_continue_each_other() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    let numbers: Vec<f32> = (0..300_000).map(|n| n as f32).collect();
    let value = Value::tensor(&[300_000], &numbers).unwrap();
    let bytes = value.as_bytes();
    let (first, second) = bytes.split_at(1 << 20);
    world.send_within(connection, 5, call_with(1, "f", &[&value]), 0, first);
    assert!(world.orders.is_empty());
    let part = InputPart { call: 1, offset: 1 << 20 };
    world.send_within(connection, 5, part, 0, second);
    assert_eq!(world.order().inputs[0].1, InputSource::Value(value.clone()));
    // A part at a wrong place ends the call; later parts are discarded.
    world.send_within(connection, 6, call_with(2, "f", &[&value]), 0, first);
    world.send_within(connection, 6, InputPart { call: 2, offset: 8 }, 0, second);
    assert!(matches!(world.refusal(), Refusal::Range { offset: 8, .. }));
    world.send_within(connection, 6, InputPart { call: 2, offset: 1 << 20 }, 0, second);
    assert!(world.sent.is_empty() && world.orders.is_empty());
    // A call whose connection breaks in the middle is forgotten, and can be sent again.
    world.send_within(connection, 7, call_with(3, "f", &[&value]), 0, first);
    world.input(ServiceInput::Disconnected { connection });
    let (connection, _) = world.connect(1);
    world.send_within(connection, 7, call_with(3, "f", &[&value]), 0, first);
    assert!(world.sent.is_empty());
}

// F-3.
#[test]
fn a_call_ends_by_its_deadline_wherever_it_is() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    let x = Value::zeros::<f32>(&[2]).unwrap();
    world.send_within(connection, 1, call(1, "f"), 100, &[]);
    let order = world.order();
    world.send_within(connection, 2, call(2, "f"), 200, &[]);
    world.send_within(connection, 3, call_with(3, "f", &[&x]), 300, &[]);
    let awaited = |world: &mut World| match world.refusal() {
        Refusal::Deadline { awaited, waited_ms } => (awaited.to_string(), waited_ms),
        other => panic!("{other}"),
    };
    world.pass(Duration::from_millis(100));
    let task = "function \"f\" on /job:worker/task:1";
    assert_eq!(awaited(&mut world), (format!("the result of {task}"), 100));
    assert_eq!(world.cancelled, [order.execution]);
    // The execution has not returned, and another takes its place.
    assert_eq!(world.order().call, 2);
    world.pass(Duration::from_millis(100));
    assert_eq!(awaited(&mut world), (format!("the result of {task}"), 200));
    world.pass(Duration::from_millis(100));
    assert_eq!(awaited(&mut world), (format!("the inputs of {task}"), 300));
    // Two executions have not returned: the function is refused, others are not.
    world.send(connection, 4, Call { settled: 3, ..call(4, "f") });
    assert_eq!(
        world.refusal(),
        Refusal::Unreturned { function: Text::clipped("f"), executions: 2 }
    );
    world.send(connection, 5, Call { settled: 3, ..call(5, "async") });
    assert_eq!(world.order().call, 5);
    // A late result is dropped, and the function is called again.
    world.returns(order.execution, 1_i64);
    assert!(world.sent.is_empty());
    world.send(connection, 6, Call { settled: 3, ..call(6, "f") });
    assert_eq!(world.order().call, 6);
}

// F-3.
#[test]
fn calls_are_cancelled_wherever_they_are() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    world.send(connection, 1, call(1, "f"));
    let order = world.order();
    world.send(connection, 2, call(2, "f"));
    world.send(connection, 0, CancelCall { call: 2 });
    assert_eq!(outcome(&mut world), CallOutcome::Cancelled {});
    world.send(connection, 0, CancelCall { call: 1 });
    assert_eq!(outcome(&mut world), CallOutcome::Cancelled {});
    assert_eq!(world.cancelled, [order.execution]);
    // The function has not returned, and another has its thread already.
    world.send(connection, 3, call(3, "f"));
    let next = world.order();
    assert_eq!(next.call, 3);
    let execution = order.execution;
    let result = Err(Failure::Cancelled);
    world.input(ServiceInput::Returned { execution, result });
    assert!(world.sent.is_empty());
    world.returns(next.execution, 1_i64);
    assert!(matches!(outcome(&mut world), CallOutcome::Done { .. }));
    world.send(connection, 0, CancelCall { call: 9 });
    assert!(world.sent.is_empty() && world.orders.is_empty());
}

#[test]
fn failures_and_panics_are_those_of_their_call() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    let detail = "no such user".to_owned();
    for (number, failure, expected) in [
        (1, Failure::Failed { retry: true, detail: detail.clone() }, "Failed { retry: true"),
        (2, Failure::Panicked { detail }, "Panicked { detail: Text(\"no such user\")"),
    ] {
        world.send(connection, number, call(number, "f"));
        let execution = world.order().execution;
        world.input(ServiceInput::Returned { execution, result: Err(failure) });
        let found = format!("{:?}", outcome(&mut world));
        assert!(found.starts_with(expected), "{found}");
    }
    // An output that does not suit the signature.
    let x = Value::zeros::<f32>(&[2]).unwrap();
    world.send_within(connection, 3, call_with(3, "typed", &[&x]), 0, &[0; 8]);
    let execution = world.order().execution;
    world.returns(execution, 1_i64);
    let found = format!("{:?}", outcome(&mut world));
    assert!(
        found.contains("output \\\"value\\\" of function \\\"typed\\\": it is i64 []"),
        "{found}"
    );
}

// F-9.
#[test]
fn a_silent_client_is_forgotten_with_its_calls() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    world.send(connection, 1, call(1, "f"));
    let order = world.order();
    world.pass(LEASE / 2);
    world.input(ServiceInput::Progress { connection });
    world.pass(LEASE / 2);
    assert!(world.cancelled.is_empty(), "every byte renews the lease");
    world.pass(LEASE);
    assert_eq!(
        (&world.cancelled[..], &world.closed[..]),
        (&[order.execution][..], &[connection][..])
    );
    world.returns(order.execution, 1_i64);
    assert!(world.sent.is_empty());
    assert!(!world.connect(1).1);
    assert!(world.service.wake_at().is_some());
}

#[test]
fn limits_of_clients_and_calls_are_named() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    for number in 1..=4 {
        world.send(connection, number, call(number, "f"));
    }
    world.send(connection, 5, call(5, "f"));
    let refusal = world.refusal().to_string();
    assert_eq!(refusal, "too many calls at once: the limit is 4");
    let ended = world.order();
    world.returns(ended.execution, 1_i64);
    world.sent.clear();
    let acknowledged = List::new(vec![1]).unwrap();
    world.send(connection, 6, Call { ended: acknowledged, ..call(5, "f") });
    assert!(world.sent.is_empty(), "the call that has ended makes room");
    for client in [2, 3] {
        let (connection, _) = world.connect(client);
        world.send(connection, 1, call(1, "f"));
    }
    let connection = 99;
    let request = RequestId(1);
    let client = Incarnation(4);
    world.input(ServiceInput::Connected {
        connection,
        request,
        client,
        body_crc: BodyCrc::Off {},
        principal: None,
    });
    assert!(world.closed.contains(&99));
}

#[test]
fn a_client_without_calls_gives_its_place_to_a_newcomer() {
    let mut world = world();
    let (working, _) = world.connect(1);
    world.send(working, 1, call(1, "f"));
    for client in 2..100 {
        world.pass(Duration::from_millis(1));
        world.connect(client);
    }
    assert!(!world.closed.contains(&working), "it has a call");
    assert_eq!(world.closed.len(), 96, "of three places two are the newest two clients'");
    assert!(world.connect(99).1 && world.connect(1).1);
}

// F-10.
#[test]
fn a_service_that_drains_ends_what_it_has_begun() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    world.send(connection, 1, call(1, "f"));
    let order = world.order();
    world.input(ServiceInput::Drain);
    assert!(!world.service.is_drained());
    world.send(connection, 2, call(2, "f"));
    assert_eq!(world.refusal(), Refusal::Stopping {});
    world.returns(order.execution, 1_i64);
    assert!(matches!(outcome(&mut world), CallOutcome::Done { .. }));
    assert!(world.service.is_drained());
}

#[test]
fn other_messages_are_refused() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    world.send(connection, 1, pushpull_common::protocol::message::Leave {});
    assert_eq!(world.refusal(), Refusal::Role { role: 6, kind: 52 });
    world.send(connection, 1, pushpull_common::protocol::message::RingLinked { memory: 0 });
    assert_eq!(world.refusal(), Refusal::Role { role: 6, kind: 103 });
    world.send(connection, 2, message::Heartbeat {});
    assert!(matches!(world.answer(), (2, Message::HeartbeatAnswer(_))));
    world.send(connection, 3, message::Describe {});
    let (_, _, described, body) = world.sent.remove(0);
    assert_eq!(
        (described, &body[..9]),
        (message::Described { bytes: 9 }.into(), &b"described"[..])
    );
    // Nothing is done for a connection that does not exist.
    world.send(1234, 4, call(1, "f"));
    world.input(ServiceInput::Disconnected { connection: 1234 });
    assert!(world.sent.is_empty() && world.orders.is_empty());
}

// F-9.
#[test]
fn a_forgotten_client_takes_no_thread_and_leaves_no_deadline() {
    let mut world = world();
    let (gone, _) = world.connect(1);
    let hour = 3_600_000;
    // One runs and never returns, and one has not arrived whole.
    world.send_within(gone, 1, call(1, "f"), hour, &[]);
    let x = Value::zeros::<f32>(&[2]).unwrap();
    let (header, half) = framed(2, &call_with(2, "typed", &[&x]).into(), hour, 8);
    world.input(ServiceInput::Message { connection: gone, header: &header, message: half });
    let stuck = world.order();
    world.pass(LEASE + LEASE / 4);
    assert_eq!(world.cancelled, [stuck.execution]);
    assert!(world.service.remembers_nobody());
    // The only thread has another in its place.
    let (next, known) = world.connect(2);
    assert!(!known);
    world.send(next, 1, call(1, "f"));
    assert_eq!(world.order().client, Incarnation(2));
}

/// A client acknowledges a call that still runs, because the call was cancelled or lost with its
/// connection.
#[test]
fn a_call_that_its_client_gives_up_while_it_runs_leaves_nothing() {
    let acknowledge = |number, ended| Call { ended: List::of(ended).unwrap(), ..call(number, "f") };
    for how in ["released", "ended", "settled"] {
        let mut world = world();
        let (connection, _) = world.connect(1);
        for number in 1..=20 {
            let next = match how {
                "ended" => acknowledge(number, [number - 1].into_iter().filter(|&n| n > 0)),
                "settled" => Call { settled: number - 1, ..call(number, "f") },
                _ => call(number, "f"),
            };
            world.send(connection, number, next);
            assert_eq!(world.sent.len(), 0, "call {number}, {how}: {:?}", world.sent);
            if number > 1 && how != "released" {
                // The thread of the call before is free only now.
                let before = world.order();
                world.returns(before.execution, 1_i64);
                world.sent.clear();
            }
            if how == "released" {
                let order = world.order();
                let calls = List::new(vec![number]).unwrap();
                world.send(connection, 0, Release { calls });
                world.sent.clear();
                world.returns(order.execution, 1_i64);
                world.sent.clear();
            }
        }
    }
}

#[test]
fn a_call_that_its_client_gives_up_before_it_runs_does_not_run() {
    let mut world = world();
    let (first, _) = world.connect(1);
    world.send(first, 1, call(1, "f"));
    world.send(first, 2, call(2, "f"));
    let runs = world.order();
    assert!(world.orders.is_empty(), "there is one thread");
    world.input(ServiceInput::Disconnected { connection: first });
    let (second, _) = world.connect(1);
    world.send(second, 0, Release { calls: List::new(vec![1, 2]).unwrap() });
    world.sent.clear();
    world.returns(runs.execution, 1_i64);
    assert!(world.orders.is_empty() && world.sent.is_empty(), "{:?}", world.orders);
    world.send(second, 3, call(3, "f"));
    assert_eq!(world.order().call, 3);
}
