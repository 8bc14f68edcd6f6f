//! Who may send what to a shard: every role with every message, and what administrators do.

use std::sync::Arc;
use std::time::Duration;

use pushpull_common::access::{AccessRights, Principal};
use pushpull_common::ids::{CoordinatorEpoch, CoordinatorId, TaskId};
use pushpull_common::protocol::message::{self, Operation, Role};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Envelope, Features, Header, Message, Refusal};
use pushpull_common::status::{Presence, Status, TrainingPhase};
use pushpull_optim::optimizer::Sgd;

use super::peers::{Peer, chief, variables, worker};
use super::status::with_workers;
use super::world::{ConnectionId, World};
use crate::config::PsConfig;
use crate::event::{AdminOrder, Event};

/// The bytes of every message.
const FRAMES: &str = include_str!("../../../../common/tests/golden/frames_v1.txt");

/// The page that says who may send each message.
const PAGE: &str = include_str!("../../../../docs/protocol.md");

/// The roles that a shard admits.
const ADMITTED: [Role; 5] =
    [Role::Worker {}, Role::Chief {}, Role::Reader {}, Role::Peer {}, Role::Admin {}];

/// Returns one of every kind of message.
fn messages() -> Vec<Message> {
    let is_bytes = |line: &&str| {
        let (offset, bytes) = line.split_once("  ").unwrap_or_default();
        offset.len() == 4 && bytes.split(' ').all(|byte| byte.len() == 2)
    };
    let frames = FRAMES.split("\n= ").skip(1).map(|frame| {
        let bytes = frame.lines().filter(is_bytes).flat_map(|line| line[6..].split(' '));
        let bytes: Vec<u8> = bytes.map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        let (header, meta) = bytes.split_at(Header::BYTES);
        let kind = u16::from_le_bytes([header[6], header[7]]);
        let message = [Features::NONE, Features::ALL]
            .into_iter()
            .find_map(|features| Message::take(kind, features, meta).ok());
        message.unwrap_or_else(|| panic!("kind {kind} is not read:\n{frame}"))
    });
    let mut messages: Vec<Message> = Vec::new();
    for message in frames {
        if messages.iter().all(|known| known.kind() != message.kind()) {
            messages.push(message);
        }
    }
    messages
}

/// Returns the roles that may send a message to a shard, as the page has it.
fn senders(message: &Message) -> Vec<Role> {
    let row = format!("| {} | `{}` | ", message.kind(), message.name());
    let line = PAGE.lines().find_map(|line| line.strip_prefix(&row));
    let by = line.and_then(|line| line.split(" |").next());
    let by = by.unwrap_or_else(|| panic!("the page has no {row}"));
    // The chief alone sends first values.
    if is_assignment(message) {
        return vec![Role::Chief {}];
    }
    let members = [Role::Worker {}, Role::Chief {}];
    let of_word = |word: &str| match word {
        "C" => [&members[..], &[Role::Reader {}, Role::Peer {}]].concat(),
        "M" => members.to_vec(),
        "coordinator" => [&members[..], &[Role::Reader {}]].concat(),
        "chief" => vec![Role::Chief {}],
        "peer" => vec![Role::Peer {}],
        "admin" => vec![Role::Admin {}],
        // Servers, and conversations of others.
        "S" | "any" | "step owner" | "client" | "rank" | "rendezvous" | "task" => vec![],
        // A restriction of the word before.
        "no peer" | "to the step owner" => vec![],
        word => panic!("nobody knows who {word:?} is"),
    };
    let mut roles: Vec<Role> = by.split(", ").flat_map(of_word).collect();
    if by.contains("no peer") {
        roles.retain(|role| *role != Role::Peer {});
    }
    roles
}

fn is_assignment(message: &Message) -> bool {
    let operation = match message {
        Message::PushPart(part) => part.operation,
        Message::PushEncoded(encoded) => encoded.part.operation,
        Message::PushShared(shared) => shared.operation,
        Message::EffectPart(of) => of.part.operation,
        Message::EffectEncoded(of) => of.encoded.part.operation,
        Message::EffectShared(of) => of.shared.operation,
        _ => return false,
    };
    operation == Operation::Assign {}
}

fn peer_of(role: Role) -> Peer {
    match role {
        Role::Chief {} => chief(),
        Role::Peer {} => Peer { role, ..worker(0) },
        role => Peer { role, ..worker(7) },
    }
}

#[test]
fn every_role_may_send_the_messages_that_the_page_gives_it_and_no_others() {
    let messages = messages();
    let kinds: Vec<u16> = messages.iter().map(Message::kind).collect();
    assert_eq!(kinds.len(), Message::KINDS.len(), "a sample of each: {kinds:?}");
    let mut allowed = 0;
    for role in ADMITTED {
        for message in &messages {
            let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
            let line = world.join(0, &mut peer_of(role));
            let request = world.say(line, message.clone());
            let code = role.code();
            let kind = message.kind();
            let is_refused = match world.answer(line, request) {
                Some(Message::Refused(message::Refused { refusal })) => {
                    refusal == Refusal::Role { role: code, kind }
                }
                _ => false,
            };
            let may = senders(message).contains(&role);
            assert_eq!(may, !is_refused, "{role:?} with {}", message.name());
            allowed += u32::from(may);
        }
    }
    assert!(allowed > 60, "{allowed} cells are allowed");
}

#[test]
fn roles_of_other_conversations_are_not_admitted() {
    for code in 1..=8 {
        let role = [
            Role::Worker {},
            Role::Chief {},
            Role::Reader {},
            Role::Admin {},
            Role::Peer {},
            Role::Client {},
            Role::Rank {},
            Role::Task {},
        ]
        .into_iter()
        .find(|role| role.code() == code)
        .unwrap();
        let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
        let hello = peer_of(role).hello(0);
        let is_admitted = world.handshake(0, hello, true).is_ok();
        assert_eq!(is_admitted, ADMITTED.contains(&role), "{role:?}");
    }
}

/// A principal with these roles.
fn principal(roles: &str) -> Arc<Principal> {
    let rights = AccessRights { roles: roles.parse().unwrap(), ..AccessRights::default() };
    Arc::new(Principal { name: format!("the {roles}"), rights })
}

#[test]
fn a_reader_coordinates_only_if_it_may_call_functions() {
    let name = Text::clipped("trainer");
    let coordinator = CoordinatorId(0);
    let open = message::OpenCoordinator { name, coordinator, epoch: CoordinatorEpoch(0) };
    let table = [(None, true), (Some("reader"), false), (Some("reader,client"), true)];
    for (roles, may) in table {
        let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
        world.principal = roles.map(principal);
        let line = world.join(0, &mut peer_of(Role::Reader {}));
        let request = world.say(line, open.clone().into());
        match world.answer(line, request) {
            Some(Message::CoordinatorIs(_)) => assert!(may, "{roles:?}"),
            Some(Message::Refused(message::Refused { refusal })) => {
                assert_eq!(refusal, Refusal::Role { role: 3, kind: 70 });
                assert!(!may, "{roles:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}

fn admin(world: &mut World) -> ConnectionId {
    world.principal = Some(principal("admin"));
    let line = world.join(0, &mut peer_of(Role::Admin {}));
    world.principal = None;
    line
}

fn status(world: &mut World, line: ConnectionId, members_from: u32) -> Status {
    match world.ask(line, message::StatusQuery { members_from }.into()) {
        Message::StatusIs(is) => Status::from_wire(is),
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_administrator_is_told_the_status_of_the_training() {
    let configure = |config: PsConfig| with_workers(config, 4);
    let mut world = World::bare(variables(), Sgd::new(1.0), configure);
    let line = admin(&mut world);
    let before = status(&mut world, line, 0);
    assert_eq!((before.phase, before.members), (TrainingPhase::NoVariables, vec![]));
    let first = world.join(0, &mut worker(1));
    world.join(0, &mut worker(3));
    world.now += Duration::from_millis(40);
    world.ask(first, message::Leave {}.into());
    let told = status(&mut world, line, 0);
    assert_eq!(told, world.shards[0].status(world.now), "nothing is lost on the way");
    let members: Vec<(TaskId, Presence)> =
        told.members.iter().map(|member| (member.task.clone(), member.presence)).collect();
    assert_eq!(
        members,
        [(TaskId::worker(1), Presence::Left), (TaskId::worker(3), Presence::Present)]
    );
    assert_eq!(told.never_joined, [TaskId::worker(0), TaskId::worker(2)]);
    assert_eq!(status(&mut world, line, 1).members, told.members[1..]);
    assert_eq!(status(&mut world, line, 2).members, []);
    assert_eq!(world.members, [(2, 1)], "an administrator is no member");
}

#[test]
fn the_orders_of_an_administrator_are_events_that_name_who_has_given_them() {
    let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let line = admin(&mut world);
    world.events.clear();
    world.say(line, message::Save {}.into());
    world.ask(line, message::Finish {}.into());
    assert_eq!(status(&mut world, line, 0).phase, TrainingPhase::Finished);
    assert!(world.stopped.is_empty());
    assert!(matches!(world.ask(line, message::Stop {}.into()), Message::Stopping(_)));
    assert_eq!(world.stopped, [0]);
    let orders: Vec<(AdminOrder, String)> = world
        .events
        .iter()
        .filter_map(|(_, event)| match event {
            Event::AdminOrder { order, .. } => Some((*order, event.to_string())),
            _ => None,
        })
        .collect();
    let by = "by /job:worker/task:7, who is the admin";
    let expected = [
        (AdminOrder::Save, format!("/job:ps/task:0/shard:0 was told to save a checkpoint {by}")),
        (
            AdminOrder::Finish,
            format!("/job:ps/task:0/shard:0 was told to finish the training {by}"),
        ),
        (AdminOrder::Stop, format!("/job:ps/task:0/shard:0 was told to stop {by}")),
    ];
    assert_eq!(orders, expected);
    // What the chief orders is no event of an administrator.
    world.events.clear();
    world.ask(chief[0], message::Finish {}.into());
    assert!(world.events.iter().all(|(_, event)| !event.kind().starts_with("admin")));
}

#[test]
fn an_administrator_finds_a_place_on_a_full_server() {
    let configure = |mut config: PsConfig| {
        config.network.connections_max = 2;
        config
    };
    let mut world = World::bare(variables(), Sgd::new(1.0), configure);
    let reader = world.join(0, &mut peer_of(Role::Reader {}));
    world.join(0, &mut worker(1));
    admin(&mut world);
    assert!(world.closed.contains(&reader), "a reader gives way");
    let mut other = Peer { role: Role::Admin {}, ..worker(8) };
    assert!(matches!(world.try_join(0, &mut other), Err(Refusal::Busy { .. })), "no member does");
}

#[test]
fn a_reader_that_has_proved_who_it_is_learns_of_no_member() {
    for (roles, names_workers) in [(None, true), (Some("reader"), false)] {
        let configure = |config: PsConfig| with_workers(config, 3);
        let (mut world, chief) = World::ready(variables(), Sgd::new(1.0), configure);
        let training = world.join(0, &mut worker(1));
        world.token(training);
        world.ask(chief[0], message::Finish {}.into());
        world.principal = roles.map(principal);
        let line = world.join(0, &mut peer_of(Role::Reader {}));
        let envelope = Envelope { deadline_ms: 100, ..Envelope::default() };
        let request = world.send(line, envelope, message::AwaitEnd {}.into(), &[]);
        world.now += Duration::from_millis(200);
        world.tick();
        match world.answer(line, request) {
            Some(Message::Refused(message::Refused {
                refusal: Refusal::Deadline { awaited, .. },
            })) => {
                assert_eq!(awaited.as_str().contains("/job:worker"), names_workers, "{awaited}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_shard_that_does_not_own_the_step_finishes_nothing() {
    let mut world = World::bare(variables(), Sgd::new(1.0), |config| config.shards(2));
    world.principal = Some(principal("admin"));
    let line = world.join(1, &mut peer_of(Role::Admin {}));
    let refusal = world.refused(line, message::Finish {}.into());
    assert!(refusal.to_string().contains("does not own the step"), "{refusal}");
    assert!(world.events.iter().all(|(_, event)| !event.kind().starts_with("admin")));
}
