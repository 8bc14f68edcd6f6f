//! The cost of an event for a session with many open requests.

use super::*;

/// Opens this many calls, answers them in order, and returns how many requests were examined.
fn examined(calls: usize) -> u64 {
    let mut world = world();
    let ops: Vec<CallOp> = (0..calls).map(|_| world.call(order(&[]))).collect();
    let connection = world.accept(server(9, false));
    let mut answered = 0;
    while answered < calls {
        for (request, _) in world.sent_calls() {
            world.receive(connection, request, done(&[]), &[]);
            answered += 1;
        }
    }
    let replies: Vec<CallOp> = world.replies.iter().map(|(op, _)| *op).collect();
    assert_eq!(replies, ops);
    world.session.links[world.link.0].pending.examined.get()
}

#[test]
fn an_event_examines_few_requests_however_many_are_open() {
    let few = examined(500);
    let many = examined(2_000);
    assert!(few >= 500, "each request is sent");
    assert!(many <= 4 * few + 16, "{few} for 500 calls, {many} for 2,000");
}
