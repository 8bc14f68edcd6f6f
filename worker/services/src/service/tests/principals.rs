//! Who a client has proved to be, and what that lets it do.

use pushpull_common::access::{AccessRights, Principal};
use pushpull_common::protocol::message::{FetchOutput, OutputRef};

use super::*;

fn principal(name: &str, roles: &str, functions: &[&str]) -> Option<Arc<Principal>> {
    let rights = AccessRights {
        roles: roles.parse().unwrap(),
        tasks: Vec::new(),
        functions: functions.iter().map(|&function| function.into()).collect(),
        ..AccessRights::default()
    };
    Some(Arc::new(Principal { name: name.to_owned(), rights }))
}

/// Connects a client, and returns its connection; `None` if it is denied.
fn connect(world: &mut World, client: u64, principal: Option<Arc<Principal>>) -> Option<u64> {
    let connection = world.next_connection;
    world.next_connection += 1;
    world.input(ServiceInput::Connected {
        connection,
        request: RequestId(9),
        client: Incarnation(client),
        body_crc: BodyCrc::Off {},
        principal,
    });
    match world.sent.pop() {
        Some((_, _, Message::ServerIs(_), _)) => Some(connection),
        Some((_, _, Message::Refused(refused), _)) => {
            assert_eq!(refused.refusal, Refusal::Denied {});
            assert!(world.closed.contains(&connection));
            None
        }
        other => panic!("{other:?}"),
    }
}

fn refusal(world: &mut World, connection: u64, message: impl Into<Message>) -> Option<Refusal> {
    world.send(connection, 1, message);
    match world.sent.pop() {
        None => None,
        Some((_, _, Message::Refused(refused), _)) => Some(refused.refusal),
        Some((_, _, other, _)) => panic!("{other:?}"),
    }
}

#[test]
fn a_client_calls_the_functions_of_its_principal() {
    // F-11
    let mut world = world();
    let only_f = principal("caller", "client", &["f", "no-such*"]);
    let at = connect(&mut world, 1, only_f).unwrap();
    assert_eq!(refusal(&mut world, at, call(1, "f")), None);
    assert_eq!(world.order().function, "f");
    assert_eq!(refusal(&mut world, at, call(2, "async")), Some(Refusal::Denied {}));
    // What it may not call is not told apart from what there is not.
    assert_eq!(refusal(&mut world, at, call(3, "unknown")), Some(Refusal::Denied {}));
    let unknown = refusal(&mut world, at, call(4, "no-such-function"));
    assert!(matches!(unknown, Some(Refusal::UnknownFunction { .. })), "{unknown:?}");
}

#[test]
fn an_incarnation_gives_nobody_else_its_client() {
    // F-11
    let mut world = world();
    let owner = || principal("owner", "client", &["*"]);
    let first = connect(&mut world, 1, owner()).unwrap();
    for other in [principal("thief", "client,peer", &["*"]), None] {
        assert_eq!(connect(&mut world, 1, other), None);
    }
    assert!(!world.closed.contains(&first), "the owner keeps its connection");
    let again = connect(&mut world, 1, owner()).unwrap();
    assert!(world.closed.contains(&first) && !world.closed.contains(&again));
}

#[test]
fn outputs_are_used_by_their_principal_and_fetched_for_it_by_servers() {
    // F-11
    let server = || principal("server", "client,peer", &["*"]);
    let table = [
        (2, principal("owner", "client", &["*"]), "", true),
        (3, principal("thief", "client", &["*"]), "", false),
        // Only a server fetches for others.
        (4, principal("thief", "client", &["*"]), "owner", false),
        (5, server(), "owner", true),
        (6, server(), "thief", false),
        (7, server(), "", false),
        // One that was not asked who it is, as a process of the same user, fetches for those it names.
        (8, None, "owner", true),
        (9, None, "thief", false),
        (10, None, "", true),
    ];
    let of = || OutputRef {
        owner: Incarnation(1),
        server: Incarnation(77),
        call: 1,
        output: Text::clipped("value"),
    };
    let named = || NamedInput {
        name: Text::clipped("x"),
        input: Input::Output { job: Text::clipped("worker"), task: 1, of: of() },
    };
    for (client, principal, fetches_for, may) in table {
        let mut world = world();
        let owner = connect(&mut world, 1, self::principal("owner", "client", &["*"])).unwrap();
        world.send(owner, 1, Call { retain: true, ..call(1, "f") });
        let order = world.order();
        world.returns(order.execution, Value::from("kept"));
        world.sent.clear();
        let is_owner = principal.as_ref().is_none_or(|principal| principal.name == "owner");
        let at = connect(&mut world, client, principal).unwrap();
        world.send(at, 7, FetchOutput { of: of(), principal: Text::clipped(fetches_for) });
        match world.sent.pop() {
            Some((_, _, Message::Fetched(_), _)) => assert!(may, "{client}"),
            Some((_, _, Message::Refused(refused), _)) => {
                assert_eq!((refused.refusal, may), (Refusal::Denied {}, false), "{client}");
            }
            other => panic!("{client}: {other:?}"),
        }
        let using = Call { inputs: CallInputs::of([named()]).unwrap(), ..call(1, "f") };
        let refused = refusal(&mut world, at, using);
        assert_eq!(refused, (!is_owner).then_some(Refusal::Denied {}), "{client}");
    }
}

#[test]
fn an_output_of_a_client_that_has_not_come_waits_for_it_and_is_its_principals() {
    // F-11
    for (name, may) in [("owner", true), ("thief", false)] {
        let mut world = world();
        let at = connect(&mut world, 2, principal(name, "client", &["*"])).unwrap();
        let owner = Incarnation(1);
        let output = Text::clipped("value");
        let of = OutputRef { owner, server: Incarnation(0), call: 1, output };
        world.send(at, 7, FetchOutput { of, principal: Text::default() });
        assert!(world.sent.is_empty(), "its client may come");
        let owner = connect(&mut world, 1, principal("owner", "client", &["*"])).unwrap();
        world.send(owner, 1, Call { retain: true, ..call(1, "f") });
        let order = world.order();
        world.returns(order.execution, Value::from("kept"));
        let answer = world.sent.iter().find(|(connection, ..)| *connection == at);
        match answer.map(|(_, _, message, _)| message) {
            Some(Message::Fetched(_)) => assert!(may),
            Some(Message::Refused(refused)) => {
                assert_eq!((&refused.refusal, may), (&Refusal::Denied {}, false));
            }
            other => panic!("{other:?}"),
        }
    }
}
