//! The promises of `docs/protocol.md` to a client that no other test checks.

use std::collections::BTreeMap;
use std::sync::Arc;

use pushpull_checkpoint::{CheckpointStorage, LocalDirectory};
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::codec::Encoding;
use pushpull_common::ids::{
    GlobalStep, PartitionId, RequestId, RestoreEpoch, Sequence, TaskId, TokenId,
};
use pushpull_common::protocol::message::{self, CheckpointId, Hello, Operation, Pull, PullRows};
use pushpull_common::protocol::message::{Role, Selection};
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{Envelope, Grant, Message, Outcome, Refusal};
use pushpull_common::tensor::DType;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;

use super::peers::{Peer, Push, bytes_of, chief, f32s, index_of, pack, variables, worker};
use super::world::{ConnectionId, World};
use crate::client_entry::CLIENTS_MAX;
use crate::config::{Checkpoints, PsConfig};
use crate::shard::ShardInput;
use pushpull_common::peer_origin::PeerOrigin;

const PAGE: &str = include_str!("../../../../docs/protocol.md");

/// The rows of the page's table whose head begins with `head`, by their first cell.
fn table(head: &str) -> BTreeMap<&'static str, Vec<&'static str>> {
    let behind = PAGE.split_once(head).expect("the page has the table").1;
    let rows = behind.lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells = rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect());
    cells.map(|cells: Vec<&str>| (cells[0], cells)).collect()
}

/// The state in which, by the page, a request is refused with `NotInitialized`.
fn refused_while(request: &str) -> &'static str {
    let name = format!("`{request}`");
    let rows = table("\n| request | refused so while |");
    let row = rows.into_iter().find(|(names, _)| names.split(", ").any(|it| it == name));
    row.map_or("never", |(_, cells)| cells[1])
}

fn restore(name: &str) -> Message {
    let epoch = RestoreEpoch(1);
    let step = GlobalStep(1);
    let checkpoint = CheckpointId { name: Text::clipped(name), epoch, step };
    message::Restore { checkpoint, epoch: RestoreEpoch(9) }.into()
}

/// The requests that a chief may send, without those that wait until there are values.
fn requests() -> Vec<Message> {
    let pull = || Pull { selection: Selection::All {} };
    let rows = || PullRows { partition: PartitionId(0) };
    let gradient = Push::plain(1, Operation::Gradient {}, 1).part(0, None);
    let encoded = Push::plain(1, Operation::Gradient {}, 1).encoded(1, 1, 0, None);
    let ranges = List::default();
    let operation = Operation::Gradient {};
    let token = TokenId(1);
    let generation = 1;
    let push_slot = 1;
    let whole = None;
    let next = false;
    let read = None;
    let shared =
        message::PushShared { operation, token, generation, push_slot, whole, next, read, ranges };
    vec![
        message::Heartbeat {}.into(),
        message::ShareValues { wants: 1 }.into(),
        message::SharePushBuffer {}.into(),
        message::FetchCatalogue {}.into(),
        message::FindCheckpoint {}.into(),
        message::TokenRequest { newest: TokenId(u64::MAX) }.into(),
        message::ReturnToken { token, generation }.into(),
        message::Reserve {}.into(),
        gradient,
        encoded,
        shared.into(),
        message::OutcomeQuery {}.into(),
        pull().into(),
        rows().into(),
        message::PullEncoded { pull: pull(), encoding: 0 }.into(),
        message::PullRowsEncoded { pull: rows(), encoding: 1 }.into(),
        restore("another"),
        message::Initialize { epoch: RestoreEpoch(0) }.into(),
    ]
}

/// Compares the refusals of these requests in a state with the page. `causes` are the cells of the
/// page that apply in this state.
fn check(
    world: &mut World,
    line: ConnectionId,
    state: &str,
    requests: Vec<Message>,
    causes: &[&str],
) {
    for (message, sequence) in requests.into_iter().zip(1..) {
        let name = message.name();
        let expected = causes.contains(&refused_while(name));
        let envelope = Envelope { sequence: Sequence(sequence), ..Envelope::default() };
        // The body is valid, because faults of an encoded part are refused first.
        let body = if name == "PushEncoded" { Encoding::F16.bytes_max(DType::F32, 1) } else { 0 };
        let request = world.announce(line, envelope, message, body);
        world.work();
        let answer = world.answer(line, request);
        let refused = matches!(
            &answer,
            Some(Message::Refused(refused)) if refused.refusal == Refusal::NotInitialized {}
        );
        assert_eq!(refused, expected, "{name}, {state}: {answer:?}");
    }
}

const UNDECLARED: &str = "nothing is declared";
const UNDECLARED_OR_RESTORING: &str = "nothing is declared, or a checkpoint is being restored";
const UNDECLARED_OR_ANOTHER: &str =
    "nothing is declared, or another checkpoint or epoch is being restored";
const RESTORING: &str = "a checkpoint is being restored";
const NO_VALUES: &str = "the variables have no values";
const NO_VALUES_FOR_PUSHES: &str = "the variables have no values; but an `assign` is taken from `Declare` on, until `Initialize` has begun";

#[test]
fn requests_without_values_are_refused_as_on_the_page() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::new(LocalDirectory::create(folder.path()).unwrap());
    let configure = |config: PsConfig| config.checkpoints(checkpoints.clone());
    let mut world = World::bare(variables(), Sgd::new(1.0), configure);
    let line = world.join(0, &mut chief());
    let undeclared = [
        UNDECLARED,
        UNDECLARED_OR_RESTORING,
        UNDECLARED_OR_ANOTHER,
        NO_VALUES,
        NO_VALUES_FOR_PUSHES,
    ];
    check(&mut world, line, "nothing is declared", requests(), &undeclared);

    let catalogue = world.catalogue.clone();
    world.declare(line, &catalogue);
    // Begins to restore a checkpoint. This loses the values, so it comes last.
    let (mut saved, _) = World::ready(variables(), Sgd::new(1.0), configure);
    let storage: Arc<dyn CheckpointStorage> =
        Arc::new(LocalDirectory::create(folder.path()).unwrap());
    saved.storage = Some(storage.clone());
    world.storage = Some(storage.clone());
    let checkpoint = super::restores::save(&mut saved, &storage, 1);
    let restore = message::Restore { checkpoint, epoch: RestoreEpoch(9) };
    let request = world.say(line, restore.into());
    world.advance_restore();
    assert_eq!(world.answer(line, request), None, "the checkpoint is being read");
    let restoring = [
        UNDECLARED_OR_RESTORING,
        UNDECLARED_OR_ANOTHER,
        RESTORING,
        NO_VALUES,
        NO_VALUES_FOR_PUSHES,
    ];
    check(&mut world, line, "a checkpoint is being restored", requests(), &restoring);
    let declared = world.declare(line, &catalogue);
    let refused = message::Refused { refusal: Refusal::NotInitialized {} };
    assert_eq!(declared, refused.into(), "`Declare` is refused: {}", refused_while("Declare"));
    assert_eq!(refused_while("Declare"), RESTORING);

    let mut world = World::bare(variables(), Sgd::new(1.0), configure);
    let line = world.join(0, &mut chief());
    world.declare(line, &catalogue);
    let mut declared = requests();
    declared.retain(|message| !matches!(message, Message::Restore(_)));
    let causes = [NO_VALUES, NO_VALUES_FOR_PUSHES];
    check(&mut world, line, "declared", declared, &causes);

    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |config| config);
    check(&mut world, lines[0], "ready", requests(), &[]);
}

#[test]
fn a_token_is_not_held_once_it_was_returned() {
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |config| config.shards(2));
    let Grant { token, generation, .. } = world.token(lines[0]);
    let back = || -> Message { message::ReturnToken { token, generation }.into() };
    let refused = Refusal::Token { token, generation };
    assert_eq!(world.refused(lines[1], back()), refused, "it is not the step owner");
    assert!(matches!(world.ask(lines[0], back()), Message::Returned(_)));
    assert_eq!(world.refused(lines[0], back()), refused);
}

#[test]
fn a_push_slot_has_one_number_until_it_has_a_part() {
    let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |c| c.inbox_pushes(3));
    let line = lines[0];
    let newest = TokenId(0);
    let Message::Granted(granted) = world.ask(line, message::TokenRequest { newest }.into()) else {
        panic!("a token is free")
    };
    let push_slot = granted.grant.push_slot;
    assert!(
        push_slot != 0 && world.push_slot(line) == push_slot && world.push_slot(line) == push_slot
    );
    let push = Push::gradient(1, granted.grant, push_slot);
    world.send(line, push.envelope(), push.part(0, None), &bytes_of(&[1_f32; 3]));
    let other = world.push_slot(line);
    assert!(other != push_slot && world.push_slot(line) == other, "the first is in use");
}

#[test]
fn the_token_of_an_assign_is_ignored_and_initial_values_are_the_chiefs() {
    let mut world = World::bare(variables(), Sgd::new(1.0), |config| config);
    let line = world.join(0, &mut chief());
    let catalogue = world.catalogue.clone();
    world.declare(line, &catalogue);
    let worker = world.join(0, &mut worker(1));
    let grant = Grant {
        token: TokenId(77),
        generation: 7,
        step: GlobalStep(99),
        push_slot: 0,
        samples: None,
        ahead: None,
    };
    let mut assign = |line: ConnectionId, sequence: u64, value: f32, stated: Grant| {
        let push = Push::plain(sequence, Operation::Assign {}, world.push_slot(line));
        let push = Push { grant: stated, read: Some(5), ..push };
        match world.push_answer(line, &push, &[(0, &bytes_of(&[value; 3]))]) {
            Message::PushAnswer(answer) => Ok(answer.outcome),
            Message::Refused(refused) => Err(refused.refusal),
            other => panic!("{other:?}"),
        }
    };
    let applied = |version| Outcome::Applied { version, step: GlobalStep(0), staleness: 0 };
    let refused = assign(worker, 1, 2.0, grant).unwrap_err();
    assert!(matches!(refused, Refusal::Role { role: 1, kind: 32 }), "{refused}");
    assert_eq!(assign(line, 1, 2.0, grant), Ok(applied(1)));
    let none = Grant {
        token: TokenId(0),
        generation: 0,
        step: GlobalStep(0),
        push_slot: 0,
        samples: None,
        ahead: None,
    };
    assert_eq!(assign(line, 2, 3.0, none), Ok(applied(2)));
    world.ask(line, message::Initialize { epoch: RestoreEpoch(1) }.into());
    assert_eq!(f32s(&world.values(line))[..3], [3.0; 3]);
    assert!(!world.closed.contains(&worker), "`Restore` alone closes connections");
}

#[test]
fn an_index_may_come_before_its_rows_or_after_them() {
    let variables = || {
        let table = |name| VariableSpec::f32(name, [6, 2]).unwrap().sparse();
        vec![table("a"), VariableSpec::f32("b", [2]).unwrap(), table("c")]
    };
    // `a` at 0, `b` at 48, `c` at 56; their indices at 104 and 136.
    let index = index_of(&[1_u32, 4]);
    let rows = bytes_of(&[-1_f32, -2.0, -3.0, -4.0]);
    let dense = bytes_of(&[-5_f32, -6.0]);
    let none = index_of::<u32>(&[]);
    let parts = [(0, &rows[..]), (48, &dense[..]), (104, &index[..]), (136, &none[..])];
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]] {
        let (mut world, lines) = World::ready(variables(), Sgd::new(1.0), |config| config);
        let push = world.gradient(lines[0], 1);
        let answer = world.push_answer(lines[0], &push, &order.map(|part| parts[part]));
        assert!(matches!(answer, Message::PushAnswer(_)), "{order:?}: {answer:?}");
        let values = f32s(&world.values(lines[0]));
        let mut expected = [0.0; 26];
        expected[2..4].copy_from_slice(&[1.0, 2.0]);
        expected[8..10].copy_from_slice(&[3.0, 4.0]);
        expected[12..14].copy_from_slice(&[5.0, 6.0]);
        assert_eq!(values[..26], expected, "{order:?}");
    }
}

#[test]
fn a_shard_that_does_not_own_the_step_reports_none() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config.shards(2));
    let mut peer = worker(1);
    let lines = [world.join(0, &mut peer), world.join(1, &mut peer)];
    // `d` and `n` are on the other shard.
    for sequence in 1..=2 {
        let grant = world.token(lines[0]);
        let outcomes = lines.map(|line| {
            let push = Push::gradient(sequence, grant, world.push_slot(line));
            let bytes = bytes_of(&[1_f32; 3]);
            let body = if line.shard == 0 { bytes } else { bytes_of(&[1_f64; 2]) };
            match world.push_answer(line, &push, &[(0, &body)]) {
                Message::PushAnswer(answer) => answer.outcome,
                other => panic!("not applied but {other:?}"),
            }
        });
        let applied = |step| {
            let step = GlobalStep(step);
            Outcome::Applied { version: sequence, step, staleness: 0 }
        };
        assert_eq!(outcomes, [applied(sequence), applied(0)]);
    }
}

#[test]
fn a_hello_is_checked_by_its_seen_epoch_and_not_by_its_header() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let request = RequestId(500);
    let restore_epoch = RestoreEpoch(77);
    let envelope = Envelope { request, restore_epoch, ..Envelope::default() };
    let (header, said) = pack(&envelope, &worker(1).hello(0).into(), 0);
    let Message::Hello(hello) = said else { unreachable!() };
    let line = ConnectionId { shard: 0, connection: 900 };
    let origin = PeerOrigin::Unix { same_user: true };
    let connected = ShardInput::Connected {
        connection: line.connection,
        hello: &hello,
        header: &header,
        origin,
        principal: None,
    };
    world.input(0, connected);
    assert!(matches!(world.answer(line, request), Some(Message::Welcome(_))));

    let seen = |peer: Peer| Hello { seen_epoch: RestoreEpoch(9), ..peer.hello(0) };
    let refusal = world.handshake(0, seen(worker(2)), false).unwrap_err();
    let found = RestoreEpoch(9);
    let current = RestoreEpoch(1);
    let step = GlobalStep(0);
    assert_eq!(refusal, Refusal::RestoreEpoch { found, current, step });
    let reader = Peer { role: Role::Reader {}, ..worker(3) };
    world.handshake(0, seen(reader), false).unwrap();
}

#[test]
fn the_bounds_of_a_server_match_the_page() {
    let cluster = ClusterSpec::builder().job("ps", ["a:1"]).build().unwrap();
    let config = PsConfig::new(cluster, TaskId::ps(0), Sgd::new(0.1));
    let seconds = |time: std::time::Duration| format!("{} s", time.as_secs_f64());
    let expected = BTreeMap::from([
        ("`waiting_connections_max`", config.network.waiting_connections_max.to_string()),
        ("`handshake_timeout`", seconds(config.network.handshake_timeout)),
        ("`connections_max`", config.network.connections_max.to_string()),
        ("`lease`", seconds(config.lease)),
        ("`stall_timeout`", seconds(config.network.stall_timeout)),
        ("`token_timeout`", seconds(config.token_timeout.unwrap())),
        ("`effects_kept`", format!("{} h", config.effects_kept.as_secs() / 3600)),
        ("`inbox_pushes`", config.inbox_pushes.to_string()),
        ("`CLIENTS_MAX`", CLIENTS_MAX.to_string()),
    ]);
    let stated = table("\n| bound | unless configured |");
    let stated: BTreeMap<&str, String> =
        stated.into_iter().map(|(name, cells)| (name, cells[1].replace(',', ""))).collect();
    assert_eq!(stated, expected);
}
