//! Outputs that stay on the server.

use pushpull_common::protocol::message::{
    CallEnded, CallOutcome, CancelCall, FetchOutput, Fetched, OutputRef, Release,
};

use super::*;

fn fetch(owner: u64, number: u64, output: &str) -> FetchOutput {
    FetchOutput { of: output_of(owner, number, output), principal: Text::default() }
}

fn output_of(owner: u64, call: u64, output: &str) -> OutputRef {
    let owner = Incarnation(owner);
    let server = Incarnation(0);
    OutputRef { owner, server, call, output: Text::clipped(output) }
}

fn keep(number: u64) -> Call {
    Call { retain: true, ..call(number, "f") }
}

/// A service with a client whose call 1 has left a value of 3.
fn with_kept() -> (World, u64) {
    let mut world = world();
    let (connection, _) = world.connect(1);
    world.send(connection, 1, keep(1));
    let execution = world.order().execution;
    world.returns(execution, 3_i64);
    let (_, _, message, body) = world.sent.remove(0);
    assert!(matches!(message, Message::CallEnded(CallEnded { outcome: CallOutcome::Done { .. } })));
    assert!(body.is_empty(), "the outputs stay");
    (world, connection)
}

// F-6.
#[test]
fn outputs_are_fetched_by_anyone_until_they_are_released() {
    let (mut world, owner) = with_kept();
    let (other, _) = world.connect(2);
    world.send(other, 1, fetch(1, 1, "value"));
    let (connection, _, message, body) = world.sent.remove(0);
    let is = Value::from(3_i64).value_type().to_wire();
    assert_eq!((connection, message), (other, Fetched { is }.into()));
    assert_eq!(body, 3_i64.to_le_bytes());
    world.send(other, 2, fetch(1, 1, "loss"));
    let refusal = world.refusal().to_string();
    assert_eq!(refusal, "call 1 has left no output \"loss\": function \"f\" has left \"value\"");
    // Other clients release nothing.
    world.send(other, 3, Release { calls: List::new(vec![1]).unwrap() });
    world.sent.clear();
    world.send(owner, 2, Release { calls: List::new(vec![1]).unwrap() });
    world.sent.clear();
    world.send(owner, 3, Call { settled: 1, ..call(2, "f") });
    world.send(other, 4, fetch(1, 1, "value"));
    let refusal = world.refusal().to_string();
    assert!(refusal.contains("it was not kept, or it is released"), "{refusal}");
}

// F-7.
#[test]
fn a_fetch_waits_for_its_call() {
    let mut world = world();
    let (consumer, _) = world.connect(2);
    // The client of the call is not even known.
    world.send(consumer, 1, fetch(1, 1, "value"));
    let (owner, _) = world.connect(1);
    world.send(owner, 1, keep(1));
    world.input(ServiceInput::LocalFetch {
        fetch: 8,
        execution: ExecutionId(9),
        client: Incarnation(1),
        user: OutputUser::Anybody,
        of: output_of(1, 1, "value"),
        deadline: None,
    });
    assert!(world.sent.is_empty() && world.local.is_empty());
    let execution = world.order().execution;
    world.returns(execution, 4_i64);
    let fetched = world.sent.iter().filter(|(to, ..)| *to == consumer).count();
    assert_eq!((fetched, &world.local[..]), (1, &[(8, Ok(Value::from(4_i64)))][..]));
}

#[test]
fn a_fetch_from_a_process_that_is_gone_is_refused_at_once() {
    let (mut world, owner) = with_kept();
    let from = |server: u64, of: OutputRef| FetchOutput {
        of: OutputRef { server: Incarnation(server), ..of },
        principal: Text::default(),
    };
    let own = world.service.config.incarnation.0;
    world.send(owner, 2, from(own, output_of(1, 1, "value")));
    assert!(matches!(world.sent.remove(0).2, Message::Fetched(_)));
    world.send(owner, 3, from(own + 1, output_of(1, 1, "value")));
    let refusal = world.refusal().to_string();
    assert_eq!(refusal, "call 1 has left no output \"value\": its server has restarted");
    // The client had sent the call to this process, which has forgotten the client since.
    world.send(owner, 4, from(own, output_of(9, 1, "value")));
    assert!(world.refusal().to_string().ends_with("its client is gone"));
    world.send(owner, 5, from(own, output_of(1, 2, "value")));
    assert!(world.sent.is_empty(), "the call may be on its way");
}

// F-7.
#[test]
fn a_fetch_waits_a_lease_for_the_client_of_its_call() {
    let mut world = world();
    let (consumer, _) = world.connect(2);
    world.send(consumer, 1, fetch(1, 1, "value"));
    let execution = ExecutionId(9);
    let client = Incarnation(2);
    let fetch = 8;
    let of = output_of(1, 1, "value");
    world.input(ServiceInput::LocalFetch {
        fetch,
        execution,
        client,
        user: OutputUser::Anybody,
        of,
        deadline: None,
    });
    world.pass(LEASE / 2);
    assert!(world.sent.is_empty() && world.local.is_empty());
    world.send(consumer, 2, message::Heartbeat {});
    world.sent.clear();
    world.pass(LEASE * 5 / 8);
    assert!(world.refusal().to_string().ends_with("its client is gone"));
    assert!(matches!(world.local[..], [(8, Err(Refusal::NoOutput { call: 1, .. }))]));
}

// F-7.
#[test]
fn a_fetch_that_waits_in_vain_is_refused() {
    let mut world = world();
    let (consumer, _) = world.connect(2);
    let (owner, _) = world.connect(1);
    world.send(owner, 1, keep(1));
    let order = world.order();
    world.send_within(consumer, 1, fetch(1, 1, "value"), 100, &[]);
    world.pass(Duration::from_millis(100));
    assert!(matches!(world.refusal(), Refusal::Deadline { waited_ms: 100, .. }));
    // The call fails.
    world.send(consumer, 2, fetch(1, 1, "value"));
    let result = Err(Failure::Failed { retry: false, detail: "no luck".to_owned() });
    world.input(ServiceInput::Returned { execution: order.execution, result });
    let (_, _, refused, _) = world.sent.pop().unwrap();
    assert!(format!("{refused:?}").contains("did not end well: no luck"), "{refused:?}");
    world.sent.clear();
    // The client is gone.
    world.send(consumer, 3, fetch(1, 7, "value"));
    for _ in 0..10 {
        world.input(ServiceInput::Progress { connection: consumer });
        world.pass(LEASE / 8);
    }
    let refusal = world.refusal().to_string();
    assert!(refusal.contains("its client is gone"), "{refusal}");
}

// F-5.
#[test]
fn outputs_are_charged_to_the_client() {
    let mut world = world_of(|config| config.bytes_max = 64);
    let (connection, _) = world.connect(1);
    for number in 1..=2 {
        world.send(connection, number, keep(number));
        let execution = world.order().execution;
        world.returns(execution, Value::zeros::<f64>(&[5]).unwrap());
    }
    world.sent.remove(0);
    // The function has run, and would run again for nothing.
    let detail = Text::clipped(
        "the outputs of function \"f\" need 40 bytes, and the client may use 24 more",
    );
    let outcome = CallOutcome::Failed { retry: false, detail };
    assert_eq!(world.answer().1, CallEnded { outcome }.into());
    world.send(connection, 3, Release { calls: List::new(vec![1]).unwrap() });
    world.sent.clear();
    world.send(connection, 4, keep(3));
    let execution = world.order().execution;
    world.returns(execution, Value::zeros::<f64>(&[8]).unwrap());
    assert!(matches!(world.answer().1, Message::CallEnded(_)), "released bytes are free");
}

#[test]
fn waiting_fetches_of_a_connection_are_limited() {
    let mut world = world();
    let (connection, _) = world.connect(2);
    let limit = pushpull_common::protocol::limits::PARKED_PER_CONNECTION_MAX as u64;
    for request in 0..limit {
        world.send(connection, request, fetch(1, 1, "value"));
    }
    assert!(world.sent.is_empty());
    world.send(connection, limit, fetch(1, 1, "value"));
    assert!(matches!(world.refusal(), Refusal::Busy { .. }));
}

// F-7.
#[test]
fn a_fetch_ends_with_the_execution_that_waits_for_it() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    world.send(connection, 1, Call { retain: true, ..call(1, "async") });
    let kept = world.order().execution;
    for number in 2..100 {
        world.send(connection, number, call(number, "async"));
        let ExecutionOrder { execution, client, .. } = world.order();
        let fetch = number;
        let of = output_of(1, 1, "value");
        world.input(ServiceInput::LocalFetch {
            fetch,
            execution,
            client,
            user: OutputUser::Anybody,
            of,
            deadline: None,
        });
        assert_eq!(world.service.fetches.len(), 1);
        let calls = List::new(vec![number]).unwrap();
        world.send(connection, 0, Release { calls });
        let result = Err(Failure::Cancelled);
        world.input(ServiceInput::Returned { execution, result });
        assert_eq!(world.service.fetches.len(), 0);
    }
    world.sent.clear();
    world.returns(kept, 3_i64);
    assert!(world.local.is_empty(), "{:?}", world.local);
}

// F-7.
#[test]
fn a_fetch_that_its_client_gives_up_leaves_its_place() {
    let mut world = world();
    let (connection, _) = world.connect(2);
    let (other, _) = world.connect(3);
    for request in 1..1_000 {
        world.send(connection, request, fetch(1, 1, "value"));
        // Another connection may have a request of the same number.
        world.send(other, request, CancelCall { call: 0 });
        assert_eq!(world.service.fetches.len(), 1);
        world.send(connection, request, CancelCall { call: 0 });
        assert_eq!(world.service.fetches.len(), 0);
    }
    assert!(world.sent.is_empty(), "{:?}", world.sent);
}
