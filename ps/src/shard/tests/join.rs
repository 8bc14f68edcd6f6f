//! Coming in: handshakes, the catalogue, the first values.

use std::time::Duration;

use pushpull_common::ids::{ClientEpoch, RestoreEpoch, ShardId};
use pushpull_common::identity::Identity;
use pushpull_common::initializer::Initializer;
use pushpull_common::partition::Partitioner;
use pushpull_common::protocol::message::{self, BodyCrc, CatalogueState, Operation, Role};
use pushpull_common::protocol::{Envelope, Message, Refusal};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;

use super::peers::{Push, bytes_of, chief, f32s, f64s, identity, place, variables, worker};
use super::world::World;
use crate::config::Storage;
use crate::optimizer::{Adam, Sgd};

fn bare() -> World {
    World::bare(variables(), Sgd::new(1.0), |config| config.connections_max(3))
}

#[test]
fn who_does_not_belong_here_is_told_why_and_closed() {
    let mut world = bare();
    let hello = worker(1).hello(0);
    let refusal = |world: &mut World, hello| world.greet(0, hello, false).unwrap_err();

    let mut other = hello.clone();
    other.shard = ShardId { task: 0, shard: 7 };
    let wanted = other.shard;
    assert_eq!(refusal(&mut world, other), Refusal::WrongShard { wanted, task: 0, shards: 1 });

    let mut other = hello.clone();
    (other.version_oldest, other.version_newest) = (7, 9);
    assert_eq!(refusal(&mut world, other), Refusal::Version { oldest: 0, newest: 0 });

    let mut other = hello.clone();
    let theirs = Identity::new().with("ps", "0").with("optimizer", "adam");
    other.identity = theirs.to_wire();
    let Refusal::Identity { field, server, client, server_hash, client_hash } =
        refusal(&mut world, other)
    else {
        panic!("another identity")
    };
    assert_eq!((field.as_str(), server.as_str(), client.as_str()), ("optimizer", "sgd", "adam"));
    assert_eq!((server_hash, client_hash), (identity().hash(), theirs.hash()));

    for role in [Role::Admin {}, Role::Peer {}] {
        let mut other = hello.clone();
        other.role = role;
        assert_eq!(refusal(&mut world, other), Refusal::Role { role: role.code(), kind: 1 });
    }

    let mut other = hello.clone();
    other.seen_epoch = RestoreEpoch(2);
    let (found, current) = (RestoreEpoch(2), RestoreEpoch(0));
    assert_eq!(refusal(&mut world, other), Refusal::RestoreEpoch { found, current });
    assert_eq!(world.members, [(0, 0)], "nobody has joined");
}

#[test]
fn one_connection_too_many_is_refused_until_another_goes() {
    let mut world = bare();
    let lines: Vec<_> = (0..3).map(|task| world.join(0, &mut worker(task))).collect();
    let refusal = world.try_join(0, &mut worker(3)).unwrap_err();
    assert!(matches!(refusal, Refusal::Busy { limit: 3, .. }), "{refusal}");
    world.disconnect(lines[1]);
    world.join(0, &mut worker(3));
}

#[test]
fn a_ghost_is_fenced_by_its_successor() {
    let mut world = bare();
    let mut first = worker(1);
    let line = world.join(0, &mut first);
    let mut second = first.restarted();
    world.join(0, &mut second);
    assert!(world.closed.contains(&line), "one connection for a task");
    let fenced = Refusal::Fenced { epoch: ClientEpoch(2), current: ClientEpoch(2) };
    assert_eq!(world.refused(line, message::Heartbeat {}.into()), fenced);
    let ghost = world.try_join(0, &mut first).unwrap_err();
    assert_eq!(ghost, Refusal::Fenced { epoch: ClientEpoch(1), current: ClientEpoch(2) });
    let mut liar = first.restarted().restarted();
    liar.epoch = ClientEpoch(u64::MAX);
    assert!(matches!(world.try_join(0, &mut liar), Err(Refusal::Fenced { .. })));
    assert_eq!(world.join(0, &mut first.restarted().restarted()).shard, 0, "epochs go on");
}

#[test]
fn a_shard_that_mints_no_epochs_takes_the_owners() {
    let mut world = World::bare(variables(), Sgd::new(1.0), |config| config.shards(2));
    let mut peer = worker(1);
    let refusal = world.try_join(1, &mut peer).unwrap_err();
    assert!(matches!(refusal, Refusal::Fenced { .. }), "it has no epoch yet: {refusal}");
    world.join(0, &mut peer);
    assert_eq!(peer.epoch, ClientEpoch(1));
    let line = world.join(1, &mut peer);
    let newest = pushpull_common::ids::TokenId(0);
    let refusal = world.refused(line, message::TokenRequest { newest }.into());
    assert!(matches!(refusal, Refusal::Unsupported { .. }), "it does not own the step: {refusal}");
}

#[test]
fn the_welcome_says_what_was_agreed() {
    let mut world = bare();
    for (asked, remote, agreed) in [
        (BodyCrc::Auto {}, false, BodyCrc::Off {}),
        (BodyCrc::Auto {}, true, BodyCrc::On {}),
        (BodyCrc::On {}, false, BodyCrc::On {}),
        (BodyCrc::Off {}, true, BodyCrc::Off {}),
    ] {
        let mut hello = worker(1).hello(0);
        hello.body_crc = asked;
        let (line, welcome) = world.greet(0, hello, remote).unwrap();
        assert_eq!(welcome.body_crc, agreed);
        assert_eq!((welcome.lease_ms, welcome.shards), (5000, 1));
        assert_eq!(welcome.catalogue, CatalogueState::Absent {});
        world.disconnect(line);
    }
}

#[test]
fn roles_are_checked_for_every_message() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let mut reader = worker(9);
    reader.role = Role::Reader {};
    let reader = world.join(0, &mut reader);
    let worker = world.join(0, &mut worker(1));
    for message in [message::Initialize {}.into(), message::Finish {}.into()] {
        let kind = Message::kind(&message);
        assert_eq!(world.refused(worker, message), Refusal::Role { role: 1, kind });
    }
    for message in [message::Reserve {}.into(), message::Leave {}.into()] {
        let kind = Message::kind(&message);
        assert_eq!(world.refused(reader, message), Refusal::Role { role: 3, kind });
    }
    assert_eq!(world.values(reader).len(), 56, "it may read");
    let left = world.refused(worker, message::Left {}.into());
    assert!(matches!(left, Refusal::Role { kind: 53, .. }), "{left}");
}

#[test]
fn what_does_not_fit_is_refused_with_need_and_limit_and_less_may_be_declared() {
    let limit = 2 << 20;
    let storage = Storage::Memory { bytes_max: limit };
    let mut world =
        World::bare(variables(), Adam::new(0.1), |config| config.storage(storage.clone()));
    let line = world.join(0, &mut chief());
    let large = place(vec![VariableSpec::f32("w", [1 << 18]).unwrap()], 1);
    // Values and as many spare blocks, two slots, four rooms: a MiB each.
    let Message::Refused(refused) = world.declare(line, &large) else { panic!("it cannot fit") };
    assert_eq!(refused.refusal, Refusal::DoesNotFit { need: 8 << 20, limit });
    let refusal = world.refused(line, message::FetchCatalogue {}.into());
    assert_eq!(refusal, Refusal::NotInitialized {});
    let small = world.catalogue.clone();
    assert!(matches!(world.declare(line, &small), Message::Declared(_)));
    // Another declaration gives the memory of the first back.
    let medium = place(vec![VariableSpec::f32("w", [1 << 15]).unwrap()], 1);
    for catalogue in [&medium, &small, &medium] {
        let Message::Declared(declared) = world.declare(line, catalogue) else { panic!() };
        let digest = catalogue.digest();
        assert_eq!(declared.state, CatalogueState::Declared { digest });
    }
}

#[test]
fn a_second_catalogue_is_refused_and_the_first_difference_named() {
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let mut other = variables();
    other[1] = VariableSpec::new("d", DType::F64, Shape::new([3]).unwrap()).unwrap();
    let other = place(other, 1);
    let Message::Refused(refused) = world.declare(lines[0], &other) else { panic!("differs") };
    let Refusal::Catalogue { server, client, differs } = refused.refusal else { panic!() };
    assert_eq!((server, client), (world.catalogue.digest(), other.digest()));
    assert!(differs.as_str().contains("\"d\" has the shape [2], not [3]"), "{}", differs.as_str());
    let same = world.catalogue.clone();
    let digest = same.digest();
    let Message::Declared(declared) = world.declare(lines[0], &same) else { panic!("the same") };
    assert_eq!(declared.state, CatalogueState::Ready { digest });

    let mut hello = worker(4).hello(0);
    hello.catalogue = Some(other.digest());
    let refusal = world.greet(0, hello, false).unwrap_err();
    assert!(matches!(refusal, Refusal::Catalogue { .. }), "{refusal}");
}

#[test]
fn a_declaration_that_is_no_catalogue_changes_nothing() {
    let mut world = bare();
    let line = world.join(0, &mut chief());
    let catalogue = world.catalogue.clone();
    let digest = catalogue.digest();
    let mut wrong = catalogue.encode().to_vec();
    wrong.push(0);
    let elsewhere = place(variables(), 2);
    for (digest, body) in [
        (digest, &wrong[..]),
        (digest, &[]),
        ([7; 32], catalogue.encode()),
        (elsewhere.digest(), elsewhere.encode()),
    ] {
        let declare = message::Declare { digest }.into();
        let request = world.send(line, Envelope::default(), declare, body);
        let Some(Message::Refused(refused)) = world.answer(line, request) else { panic!() };
        assert!(matches!(refused.refusal, Refusal::Catalogue { .. }), "{}", refused.refusal);
    }
    let refusal = world.refused(line, message::Initialize {}.into());
    assert_eq!(refusal, Refusal::NotInitialized {});
}

#[test]
fn the_first_values_are_the_initializers_on_any_split() {
    let variables = || {
        let normal = Initializer::Normal { mean: 0.0, stddev: 0.5 };
        vec![
            VariableSpec::f32("a", [5, 7001]).unwrap().initializer(normal).seed(3),
            VariableSpec::new("b", DType::F64, Shape::new([9]).unwrap())
                .unwrap()
                .initializer(Initializer::GlorotUniform),
            VariableSpec::new("c", DType::I64, Shape::scalar())
                .unwrap()
                .initializer(Initializer::Constant(-4.0)),
        ]
    };
    let mut whole = (vec![0_f32; 35005], vec![0_f64; 9]);
    let catalogue = place(variables(), 1);
    catalogue.fill(0.into(), 0, &mut whole.0);
    catalogue.fill(1.into(), 0, &mut whole.1);
    for (shards, parts) in [(1, 1), (2, 2), (3, 5)] {
        let mut split = variables();
        split[0] = split[0].clone().partitioner(Partitioner::Fixed { shards: parts });
        let (mut world, lines) =
            World::ready(split, Sgd::new(1.0), |config| config.shards(shards));
        let mut seen = 0;
        for line in lines {
            let values = world.values(line);
            let id = ShardId { task: 0, shard: line.shard as u16 };
            for partition in world.catalogue.layout(id).partitions() {
                let start = partition.offset as usize;
                let bytes = &values[start..start + partition.bytes as usize];
                let range = partition.elements.start as usize..partition.elements.end as usize;
                match partition.variable.0 {
                    0 => assert_eq!(f32s(bytes), whole.0[range]),
                    1 => assert_eq!(f64s(bytes), whole.1[range]),
                    _ => assert_eq!(bytes, (-4_i64).to_le_bytes()),
                }
                seen += partition.bytes;
            }
        }
        assert_eq!(seen, 4 * 35005 + 8 * 9 + 8);
    }
}

#[test]
fn what_was_assigned_before_is_not_initialized() {
    let variables = || {
        let ones = |name| VariableSpec::f32(name, [2]).unwrap().initializer(Initializer::Ones);
        vec![ones("a"), ones("b"), ones("c")]
    };
    let mut world = World::bare(variables(), Sgd::new(1.0), |config| config);
    let line = world.join(0, &mut chief());
    let catalogue = world.catalogue.clone();
    let push = Push::plain(1, Operation::Assign {}, 1);
    let request = world.push(line, &push, &[(8, &bytes_of(&[5_f32, 6.0]))]);
    let refused = world.answer(line, request);
    assert!(matches!(refused, Some(Message::Refused(_))), "nothing is declared: {refused:?}");
    world.declare(line, &catalogue);

    let room = world.room(line);
    let gradient = Push { operation: Operation::Gradient {}, room, ..push };
    let answer = world.push_answer(line, &gradient, &[(8, &[0; 8])]);
    let Message::Refused(refused) = answer else { panic!("no values to train yet") };
    assert_eq!(refused.refusal, Refusal::NotInitialized {});
    let room = world.room(line);
    let push = Push { room, ..push };
    // The assignment waits for its turn when the initialization is asked for.
    let assigned = world.push(line, &push, &[(8, &bytes_of(&[5_f32, 6.0]))]);
    let ready = world.say(line, message::Initialize {}.into());
    world.work();
    assert!(matches!(world.answer(line, assigned), Some(Message::PushAnswer(_))));
    assert!(matches!(world.answer(line, ready), Some(Message::Ready(_))));
    assert_eq!(f32s(&world.values(line)), [1.0, 1.0, 5.0, 6.0, 1.0, 1.0]);

    // Asked again, it is still ready and nothing is overwritten.
    assert!(matches!(world.ask(line, message::Initialize {}.into()), Message::Ready(_)));
    assert_eq!(f32s(&world.values(line))[2..4], [5.0, 6.0]);
}

#[test]
fn those_who_wait_for_the_values_are_answered_when_they_are_there() {
    let mut world = bare();
    let (chief, waiting) = (world.join(0, &mut chief()), world.join(0, &mut worker(1)));
    let envelope = Envelope { deadline_ms: 300, ..Envelope::default() };
    let impatient = world.send(waiting, envelope, message::AwaitReady {}.into(), &[]);
    let patient = world.say(waiting, message::AwaitReady {}.into());
    let refusal = world.refused(waiting, message::FetchCatalogue {}.into());
    assert_eq!(refusal, Refusal::NotInitialized {});
    world.pass(Duration::from_millis(299), &[chief, waiting]);
    assert_eq!(world.answer(waiting, impatient), None);
    world.pass(Duration::from_millis(1), &[chief, waiting]);
    let Some(Message::Refused(refused)) = world.answer(waiting, impatient) else { panic!() };
    let Refusal::Deadline { waited_ms: 300, awaited } = refused.refusal else { panic!() };
    assert!(awaited.as_str().contains("the chief"), "{}", awaited.as_str());

    let catalogue = world.catalogue.clone();
    world.declare(chief, &catalogue);
    let first = world.say(chief, message::Initialize {}.into());
    let second = world.say(chief, message::Initialize {}.into());
    assert_eq!(world.answer(chief, second), None);
    world.work();
    for (line, request) in [(chief, first), (chief, second), (waiting, patient)] {
        let Some(Message::Ready(ready)) = world.answer(line, request) else { panic!() };
        assert_eq!(ready.digest, catalogue.digest());
    }
    assert!(matches!(world.ask(waiting, message::AwaitReady {}.into()), Message::Ready(_)));
    let fetched = world.ask(waiting, message::FetchCatalogue {}.into());
    let Message::CatalogueIs(is) = fetched else { panic!("{fetched:?}") };
    assert_eq!(is.digest, catalogue.digest());
}
