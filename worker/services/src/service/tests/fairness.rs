//! Fairness between clients: each has threads of its own, also beside functions that wait or do not
//! return.

use pushpull_common::protocol::message::CancelCall;

use super::*;

/// Takes the orders, as clients and calls.
fn taken(world: &mut World) -> Vec<(u64, u64)> {
    world.orders.drain(..).map(|order| (order.client.0, order.call)).collect()
}

// F-8.
#[test]
fn long_calls_of_a_client_keep_no_other_out() {
    let mut world = world();
    let connections = [1, 2, 3].map(|client| world.connect(client).0);
    for number in 1..=3 {
        world.send(connections[0], number, call(number, "f"));
    }
    world.send(connections[1], 1, call(1, "f"));
    world.send(connections[2], 1, call(1, "f"));
    let mut turns = Vec::new();
    while !world.orders.is_empty() {
        let order = world.order();
        turns.push((order.client.0, order.call));
        world.returns(order.execution, 1_i64);
    }
    // Each has the one thread, and the first client runs one call after the other.
    assert_eq!(turns, [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3)]);
}

#[test]
fn asynchronous_functions_need_no_thread() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    let (other, _) = world.connect(2);
    world.send(connection, 1, call(1, "f"));
    world.send(connection, 2, call(2, "f"));
    for number in 1..=3 {
        world.send(other, number, call(number, "async"));
    }
    let running: Vec<_> = world.orders.iter().map(|o| (o.client.0, o.call)).collect();
    assert_eq!(running, [(1, 1), (2, 1), (2, 2)], "one thread, two asynchronous calls");
    // The first call of a client runs, however many others have.
    let (third, _) = world.connect(3);
    world.send(third, 1, call(1, "async"));
    world.send(third, 2, call(2, "async"));
    assert_eq!(world.orders.last().map(|order| (order.client.0, order.call)), Some((3, 1)));
    let ended = [1, 2].map(|index: usize| world.orders[index].execution);
    ended.into_iter().for_each(|execution| world.returns(execution, 1_i64));
    let last = world.orders.last().map(|order| (order.client.0, order.call));
    assert_eq!(last, Some((2, 3)), "clients take turns");
}

#[test]
fn a_function_lends_its_thread_while_it_waits() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    for number in 1..=3 {
        world.send_within(connection, number, call(number, "f"), 1_000, &[]);
    }
    let first = world.order();
    assert!(world.orders.is_empty(), "there is one thread");
    let waits = |world: &mut World, awaited: Option<&str>| {
        let execution = first.execution;
        let awaited = awaited.map(str::to_owned);
        world.input(ServiceInput::Waits { execution, awaited });
    };
    waits(&mut world, Some("a chief"));
    let second = world.order();
    assert_eq!((second.call, world.orders.len()), (2, 0), "the second has its thread");
    // It goes on at once, and nothing else begins until both have returned.
    waits(&mut world, None);
    world.returns(second.execution, 1_i64);
    assert!(world.orders.is_empty());
    waits(&mut world, Some("a chief"));
    assert_eq!(world.order().call, 3);
    world.sent.clear();
    world.pass(Duration::from_secs(1));
    let texts: Vec<String> = world.sent.iter().map(|(_, _, it, _)| format!("{it:?}")).collect();
    let named = |text: &String| text.contains("a chief, for function") && text.contains("task:1");
    assert_eq!(texts.iter().filter(|text| named(text)).count(), 1, "{texts:?}");
}

/// Returns the cause of the wait of the only call whose deadline passes within a second.
fn awaited(world: &mut World) -> String {
    world.sent.clear();
    world.pass(Duration::from_secs(1));
    match world.refusal() {
        Refusal::Deadline { awaited, .. } => awaited.as_str().to_owned(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_deadline_names_the_limit_for_which_a_call_was_queued() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    world.send(connection, 1, call(1, "f"));
    world.send_within(connection, 2, call(2, "f"), 1_000, &[]);
    assert_eq!(
        awaited(&mut world),
        "a thread for function \"f\": the calls of this client have all 1 of theirs on \
         /job:worker/task:1"
    );
    for number in 3..=4 {
        world.send(connection, number, call(number, "async"));
    }
    let (other, _) = world.connect(2);
    // The first call of a client always runs.
    world.send(other, 1, call(1, "async"));
    world.send_within(other, 2, call(2, "async"), 1_000, &[]);
    assert_eq!(
        awaited(&mut world),
        "a place for function \"async\": the asynchronous calls of all clients have all 2 on \
         /job:worker/task:1"
    );
    // A call begins behind the earlier ones of its client.
    world.send(other, 3, call(3, "async"));
    world.send_within(other, 4, call(4, "f"), 1_000, &[]);
    let text = awaited(&mut world);
    assert!(text.starts_with("a place for function \"f\": the asynchronous calls"), "{text}");
}

#[test]
fn the_deadline_of_a_fetch_names_its_task() {
    let mut world = world();
    let (connection, _) = world.connect(1);
    let of = message::OutputRef {
        owner: Incarnation(1),
        server: Incarnation(0),
        call: 7,
        output: Text::clipped("v"),
    };
    world.send_within(
        connection,
        1,
        message::FetchOutput { of, principal: Text::default() },
        1_000,
        &[],
    );
    assert_eq!(awaited(&mut world), "the output \"v\" of call 7 on /job:worker/task:1");
}

#[test]
fn functions_that_do_not_return_are_counted_by_client() {
    let mut world = world();
    let (first, _) = world.connect(1);
    for number in 1..=2 {
        world.send_within(first, number, call(number, "f"), 100, &[]);
        world.pass(Duration::from_millis(100));
        world.sent.clear();
    }
    world.send(first, 3, call(3, "f"));
    let refusal = Refusal::Unreturned { function: Text::clipped("f"), executions: 2 };
    assert_eq!(world.refusal(), refusal);
    let (second, _) = world.connect(2);
    world.send(second, 1, call(1, "f"));
    assert_eq!(taken(&mut world), [(1, 1), (1, 2), (2, 1)]);
}

// F-8.
#[test]
fn cancelled_functions_that_go_on_are_limited_by_client() {
    for function in ["f", "async"] {
        let mut world = world_of(|config| config.asynchronous_max = 1024);
        let (connection, _) = world.connect(1);
        let mut begun = 0;
        for number in 1..=40 {
            world.send(connection, number, call(number, function));
            begun += world.orders.drain(..).count();
            world.send(connection, 0, CancelCall { call: number });
            world.send(connection, 0, message::Release { calls: List::new(vec![number]).unwrap() });
            world.sent.clear();
        }
        assert_eq!(begun, 17, "16 that go on, and one more");
        world.send_within(connection, 41, call(41, function), 100, &[]);
        let (other, _) = world.connect(2);
        world.send(other, 1, call(1, function));
        assert_eq!(taken(&mut world), [(2, 1)]);
        world.pass(Duration::from_millis(100));
        let refusal = world.refusal().to_string();
        let expected = match function {
            "f" => "a thread for function \"f\": the calls of this client have all 1 of theirs",
            _ => "a place for function \"async\": 17 executions for this client go on",
        };
        assert!(refusal.contains(expected), "{refusal}");
    }
}

// F-4, F-5.
#[test]
fn all_clients_together_have_a_total() {
    let mut world = world_of(|config| config.total_bytes_max = 1 << 20);
    let half = Value::zeros::<f32>(&[1 << 17]).unwrap();
    for client in 1..=2 {
        let (connection, _) = world.connect(client);
        let message = call_with(1, "f", &[&half]);
        let (header, message) = framed(1, &message.into(), 0, 0);
        world.input(ServiceInput::Message { connection, header: &header, message });
        assert!(world.sent.is_empty(), "{:?}", world.sent);
    }
    let (third, _) = world.connect(3);
    world.send(third, 1, call_with(1, "f", &[&Value::scalar(1.0_f32)]));
    let refusal = world.refusal().to_string();
    assert!(refusal.contains("beside those of other clients"), "{refusal}");
    world.send(third, 2, call(2, "f"));
    let execution = world.order().execution;
    world.returns(execution, 1_i64);
    let answer = format!("{:?}", world.answer().1);
    assert!(answer.contains("Failed { retry: false"), "{answer}");
    assert!(answer.contains("beside those of other clients"), "{answer}");
    // A client that is forgotten leaves its memory to the others.
    world.pass(LEASE + LEASE / 4);
    let (fourth, _) = world.connect(4);
    let (header, message) = framed(1, &call_with(1, "f", &[&half]).into(), 0, 0);
    world.input(ServiceInput::Message { connection: fourth, header: &header, message });
    assert!(world.sent.is_empty(), "{:?}", world.sent);
}

// F-4, F-5.
#[test]
fn inputs_that_a_call_does_not_bring_are_charged_before_they_are_there() {
    let mut world = world_of(|config| config.bytes_max = 1 << 20);
    let (connection, _) = world.connect(1);
    world.send(connection, 1, call(1, "async"));
    world.send(connection, 2, call(2, "async"));
    let first = world.order().execution;
    let second = world.order().execution;
    assert_eq!(world.service.charge_input(first, 600 << 10), Ok(()));
    let what = Text::clipped("the inputs of function \"async\"");
    let refusal = Refusal::Memory { what, bytes: 600 << 10, left: 424 << 10 };
    assert_eq!(world.service.charge_input(second, 600 << 10), Err(refusal));
    assert_eq!(world.service.charge_input(second, 424 << 10), Ok(()));
    // What nobody waits for holds its inputs until it returns.
    world.send(connection, 0, CancelCall { call: 1 });
    assert!(world.service.charge_input(first, 1).is_err());
    assert!(world.service.charge_input(second, 8).is_err());
    world.returns(first, 1_i64);
    assert_eq!(world.service.charge_input(second, 600 << 10), Ok(()));
    world.returns(second, 1_i64);
    world.service.check_invariants();
}
