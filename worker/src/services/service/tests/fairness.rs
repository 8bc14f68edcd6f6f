//! Clients take turns, and functions that block keep no others out.

use super::*;

#[test]
fn clients_take_turns() {
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
    assert_eq!(turns, [(1, 1), (1, 2), (2, 1), (3, 1), (1, 3)]);
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
    let execution = world.orders[1].execution;
    world.returns(execution, 1_i64);
    let last = world.orders.last().map(|order| (order.client.0, order.call));
    assert_eq!(last, Some((2, 3)));
}
