//! Servers that break the protocol.

use pushpull_common::protocol::message::{Fetched, Leave, OutputPart, ValueIs};
use pushpull_common::protocol::wire::List;

use super::*;

/// Returns the error of a call whose server sends a message in answer.
fn error_after(message: impl Into<Message>, body: &[u8]) -> String {
    let mut world = world();
    world.call(order(&[]));
    let connection = world.accept(server(7, false));
    let request = world.sent_calls()[0].0;
    world.receive(connection, request, message, body);
    assert_eq!(world.disconnects, [connection]);
    world.error()
}

#[test]
fn nonsense_ends_the_connection_and_what_waits_for_it() {
    let no_type = ValueIs { elements: 99, extents: List::default() };
    let value = Value::from(1_i64);
    let table = [
        (error_after(Leave {}, &[]), "an unexpected Leave message"),
        (error_after(done(&[("v", &value)]), &[0; 16]), "more bytes than its values have"),
        (
            error_after(
                CallEnded {
                    outcome: CallOutcome::Done {
                        outputs: List::of([NamedValue { name: Text::clipped("v"), is: no_type }])
                            .unwrap(),
                    },
                },
                &[],
            ),
            "values of no type",
        ),
    ];
    for (error, what) in table {
        assert_eq!(error, format!("cannot call \"f\": /job:worker/task:2 has sent {what}"));
    }
}

#[test]
fn parts_out_of_place_and_answers_of_another_kind_are_breaches() {
    let mut world = world();
    world.call(order(&[]));
    let connection = world.accept(server(7, false));
    let request = world.sent_calls()[0].0;
    let value = Value::zeros::<f64>(&[4]).unwrap();
    world.receive(connection, request, done(&[("v", &value)]), &[0; 8]);
    world.receive(connection, request, OutputPart { offset: 16 }, &[0; 8]);
    assert!(world.error().contains("a part of an answer out of place"));
    // The end of a call in answer to a fetch.
    let fetch = fetch(output_of(Incarnation(1), 1));
    world.command(fetch, None);
    world.pass(Duration::from_millis(20));
    let connection = world.accept(server(7, true));
    let request = world.sent.remove(0).1.request;
    world.receive(connection, request, done(&[]), &[]);
    assert!(world.error().contains("the end of a call in place of an answer"));
}

#[test]
fn messages_for_nobody_are_ignored() {
    let mut world = world();
    world.call(order(&[]));
    let connection = world.accept(server(7, false));
    let value = Value::from(1_i64);
    let nobody = RequestId(1234);
    world.receive(connection, nobody, done(&[("v", &value)]), &[0; 8]);
    world.receive(connection, nobody, OutputPart { offset: 3 }, &[0; 8]);
    let is = value.value_type().to_wire();
    world.receive(connection, nobody, Fetched { is }, &[0; 8]);
    assert!(world.replies.is_empty() && world.disconnects.is_empty());
    // A server that speaks before its welcome.
    world.breaks(connection);
    world.pass(Duration::from_millis(20));
    let (connection, _) = world.connects.pop().unwrap();
    world.input(CallInput::Connected { connection });
    world.receive(connection, nobody, done(&[]), &[]);
    assert!(world.disconnects.contains(&connection));
}
