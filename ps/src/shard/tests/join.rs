//! Declaration of the catalogue, and initialization of the values.

use std::time::Duration;

use pushpull_common::ids::{RestoreEpoch, ShardId};
use pushpull_common::initializer::Initializer;
use pushpull_common::partition::Partitioner;
use pushpull_common::protocol::message::{self, CatalogueState, Operation};
use pushpull_common::protocol::{Envelope, Message, Refusal};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{Adam, Sgd};

use super::peers::{Push, bytes_of, chief, f32s, f64s, place, variables, worker};
use super::world::{Received, World};
use crate::config::{Network, Storage};

fn bare() -> World {
    World::bare(variables(), Sgd::new(1.0), |config| {
        config.network(Network::default().connections_max(3))
    })
}

#[test]
fn a_declaration_that_does_not_fit_is_refused_with_need_and_limit() {
    let limit = 3 << 20;
    let storage = Storage::memory().bytes_max(limit);
    let mut world =
        World::bare(variables(), Adam::new(0.1), |config| config.storage(storage.clone()));
    let line = world.join(0, &mut chief());
    let large = place(vec![VariableSpec::f32("w", [1 << 18]).unwrap()], 1);
    // 7 MiB and some overhead: values with a shadow, the same for two optimizer slots, and a push
    // slot, of a MiB each.
    let Message::Refused(refused) = world.declare(line, &large) else {
        panic!("the declaration is accepted")
    };
    let Refusal::DoesNotFit { need, limit: found, made_of } = refused.refusal else {
        panic!("{refused:?}")
    };
    let made_of = made_of.to_string();
    for part in [
        "7.5 times the 1 MiB of its values",
        "2.0 MiB for them",
        "4.0 MiB for 2 optimizer slots",
        "1 MiB for a push slot",
        "bytes_max (--bytes-max)",
    ] {
        assert!(made_of.contains(part), "{part}: {made_of}");
    }
    assert!((7 << 20..8 << 20).contains(&need) && found == limit, "{need} {found}");
    // The sizes of a small model have smaller units.
    let storage = Storage::memory().bytes_max(300 << 10);
    let mut tight =
        World::bare(variables(), Adam::new(0.1), |config| config.storage(storage.clone()));
    let tight_line = tight.join(0, &mut chief());
    let tiny = place(vec![VariableSpec::f32("w", [3]).unwrap()], 1);
    let Message::Refused(refused) = tight.declare(tight_line, &tiny) else {
        panic!("the declaration is accepted")
    };
    let text = refused.refusal.to_string();
    assert!(text.contains(" bytes of its values: ") && text.contains(" KiB for "), "{text}");
    assert!(!text.contains(" 0.0 "), "{text}");
    let refusal = world.refused(line, message::FetchCatalogue {}.into());
    assert_eq!(refusal, Refusal::NotInitialized {});
    let small = world.catalogue.clone();
    assert!(matches!(world.declare(line, &small), Message::Declared(_)));
    // Another declaration releases the memory of the one before.
    let medium = place(vec![VariableSpec::f32("w", [1 << 15]).unwrap()], 1);
    for catalogue in [&medium, &small, &medium] {
        let Message::Declared(declared) = world.declare(line, catalogue) else { panic!() };
        let digest = catalogue.digest();
        assert_eq!(declared.state, CatalogueState::Declared { digest });
    }
    // A refused declaration does not change the earlier one.
    assert!(matches!(world.declare(line, &large), Message::Refused(_)));
    let Message::CatalogueIs(kept) = world.ask(line, message::FetchCatalogue {}.into()) else {
        panic!("the catalogue is gone")
    };
    assert_eq!(kept.digest, medium.digest());
}

#[test]
fn a_different_catalogue_is_refused_with_its_first_difference() {
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
    let refusal = world.handshake(0, hello, false).unwrap_err();
    assert!(matches!(refusal, Refusal::Catalogue { .. }), "{refusal}");
}

#[test]
fn an_invalid_catalogue_changes_nothing() {
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
    let refusal = world.refused(line, message::Initialize { epoch: RestoreEpoch(1) }.into());
    assert_eq!(refusal, Refusal::NotInitialized {});
}

#[test]
fn initial_values_do_not_depend_on_the_split() {
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
        let (mut world, lines) = World::ready(split, Sgd::new(1.0), |config| config.shards(shards));
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
fn values_assigned_before_initialization_are_kept() {
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

    let push_slot = world.push_slot(line);
    let gradient = Push { operation: Operation::Gradient {}, push_slot, ..push };
    let answer = world.push_answer(line, &gradient, &[(8, &[0; 8])]);
    let Message::Refused(refused) = answer else {
        panic!("a gradient is accepted before there are values")
    };
    assert_eq!(refused.refusal, Refusal::NotInitialized {});
    let push_slot = world.push_slot(line);
    let push = Push { push_slot, ..push };
    // The assignment is still queued when the initialization is requested.
    let assigned = world.push(line, &push, &[(8, &bytes_of(&[5_f32, 6.0]))]);
    let ready = world.say(line, message::Initialize { epoch: RestoreEpoch(1) }.into());
    world.work();
    assert!(matches!(world.answer(line, assigned), Some(Message::PushAnswer(_))));
    assert!(matches!(world.answer(line, ready), Some(Message::Ready(_))));
    assert_eq!(f32s(&world.values(line)), [1.0, 1.0, 5.0, 6.0, 1.0, 1.0]);

    // A second request is answered in the same way and overwrites nothing.
    assert!(matches!(
        world.ask(line, message::Initialize { epoch: RestoreEpoch(1) }.into()),
        Message::Ready(_)
    ));
    assert_eq!(f32s(&world.values(line))[2..4], [5.0, 6.0]);
}

#[test]
fn clients_that_wait_for_values_are_answered_once_they_exist() {
    let mut world = bare();
    let chief = world.join(0, &mut chief());
    let waiting = world.join(0, &mut worker(1));
    let envelope = Envelope { deadline_ms: 300, ..Envelope::default() };
    let with_deadline = world.send(waiting, envelope, message::AwaitReady {}.into(), &[]);
    let without_deadline = world.say(waiting, message::AwaitReady {}.into());
    let refusal = world.refused(waiting, message::FetchCatalogue {}.into());
    assert_eq!(refusal, Refusal::NotInitialized {});
    world.pass(Duration::from_millis(299), &[chief, waiting]);
    assert_eq!(world.answer(waiting, with_deadline), None);
    world.pass(Duration::from_millis(1), &[chief, waiting]);
    let Some(Message::Refused(refused)) = world.answer(waiting, with_deadline) else { panic!() };
    let Refusal::Deadline { waited_ms: 300, awaited } = refused.refusal else { panic!() };
    assert!(awaited.as_str().contains("a chief to initialize"), "{}", awaited.as_str());

    let catalogue = world.catalogue.clone();
    world.declare(chief, &catalogue);
    let first = world.say(chief, message::Initialize { epoch: RestoreEpoch(1) }.into());
    let second = world.say(chief, message::Initialize { epoch: RestoreEpoch(1) }.into());
    assert_eq!(world.answer(chief, second), None);
    world.work();
    for (line, request) in [(chief, first), (chief, second), (waiting, without_deadline)] {
        let Some(Message::Ready(ready)) = world.answer(line, request) else { panic!() };
        assert_eq!(ready.digest, catalogue.digest());
    }
    assert!(matches!(world.ask(waiting, message::AwaitReady {}.into()), Message::Ready(_)));
    world.received.clear();
    world.say(waiting, message::FetchCatalogue {}.into());
    let Some(Received::Message { message: Message::CatalogueIs(is), body, .. }) =
        world.received.get_mut(&waiting).and_then(Vec::pop)
    else {
        panic!("the catalogue is sent")
    };
    assert_eq!((is.digest, &body[..]), (catalogue.digest(), catalogue.encode()));
}
