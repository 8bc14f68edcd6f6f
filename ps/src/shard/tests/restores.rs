//! Restores of a checkpoint: no request, token or connection from before outlives one.

use std::sync::Arc;

use pushpull_checkpoint::{
    CheckpointStorage, Contents, LocalDirectory, ReadFile, Save, ShardEntry, StorageFault,
    WriteFile,
};
use pushpull_common::ids::{EffectNumber, GlobalStep, PartitionId, RestoreEpoch, ShardId, TokenId};
use pushpull_common::protocol::message::{CheckpointId, Role};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{EffectRef, Envelope, Message, Outcome, Refusal, message};
use pushpull_common::table::TableSpec;
use pushpull_common::tensor::DType;
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{Adam, Sgd};

use super::effects::{coordinator_is, effect, open};
use super::peers::{Peer, Push, bytes_of, chief, f32s, index_of, worker};
use super::world::{ConnectionId, World};
use crate::checkpoint::tests::by_sgd;
use crate::checkpoint::tests::gate::Gate;
use crate::config::Checkpoints;
use crate::shard::ShardInput;
use crate::shard::file_work::RESTORED_LIMIT;

const ELEMENTS: u64 = 4;

/// A world with checkpoints in this folder, and the connection of its chief.
fn world(folder: &std::path::Path) -> (World, ConnectionId, Arc<dyn CheckpointStorage>) {
    world_of(folder, ELEMENTS)
}

fn world_of(
    folder: &std::path::Path,
    elements: u64,
) -> (World, ConnectionId, Arc<dyn CheckpointStorage>) {
    world_with(folder, vec![VariableSpec::f32("w", [elements]).unwrap()])
}

/// A world of `w` and a growing table, `users`, which holds at most `rows_max` rows.
fn world_with_table(
    folder: &std::path::Path,
    rows_max: u64,
) -> (World, ConnectionId, Arc<dyn CheckpointStorage>) {
    let row_bytes = 8;
    let users = TableSpec::new(rows_max * (row_bytes + TableSpec::ROW_OVERHEAD_BYTES));
    let users = VariableSpec::table("users", DType::F32, [2], users.rows_at_once(4)).unwrap();
    world_with(folder, vec![VariableSpec::f32("w", [ELEMENTS]).unwrap(), users])
}

fn world_with(
    folder: &std::path::Path,
    variables: Vec<VariableSpec>,
) -> (World, ConnectionId, Arc<dyn CheckpointStorage>) {
    let storage = || LocalDirectory::create(folder).unwrap();
    let checkpoints = Checkpoints::new(storage());
    let (mut world, lines) =
        World::ready(variables, Sgd::new(1.0), |config| config.checkpoints(checkpoints.clone()));
    let storage: Arc<dyn CheckpointStorage> = Arc::new(storage());
    world.storage = Some(storage.clone());
    (world, lines[0], storage)
}

fn push(world: &mut World, line: ConnectionId, sequence: u64) {
    let grant = world.token(line);
    let push_slot = world.push_slot(line);
    let body = bytes_of(&[-1_f32; ELEMENTS as usize]);
    world.push_answer(line, &Push::gradient(sequence, grant, push_slot), &[(0, &body)]);
}

/// The ids of the rows that [`push_with_rows`] pushes.
const IDS: [u64; 3] = [3, 5, 1 << 40];

/// Pushes minus ones to `w` and to three rows of `users`.
fn push_with_rows(world: &mut World, line: ConnectionId, sequence: u64) {
    let part = world.catalogue.layout(ShardId { task: 0, shard: 0 }).tables()[0].clone();
    let at = part.index.expect("a table has an index");
    let push = world.gradient(line, sequence);
    let index = index_of(&IDS);
    let rows = bytes_of(&[-1_f32; 2 * IDS.len()]);
    let values = bytes_of(&[-1_f32; ELEMENTS as usize]);
    let answer =
        world.push_answer(line, &push, &[(at, &index), (part.offset, &rows), (0, &values)]);
    assert!(matches!(answer, Message::PushAnswer(_)), "{answer:?}");
}

/// Pulls the rows that [`push_with_rows`] pushes.
fn rows(world: &mut World, line: ConnectionId) -> Vec<f32> {
    let ids: Vec<u8> = IDS.iter().flat_map(|id| id.to_le_bytes()).collect();
    let pull = message::PullRows { partition: PartitionId(1) };
    let request = world.send(line, Envelope::default(), pull.into(), &ids);
    world.work();
    match world.answer_with_body(line, request) {
        (Message::Rows(_), body) => f32s(&body),
        (other, _) => panic!("rows are answered by {other:?}"),
    }
}

/// Saves a checkpoint of the only shard.
pub(super) fn save(
    world: &mut World,
    storage: &Arc<dyn CheckpointStorage>,
    step: u64,
) -> CheckpointId {
    save_forged(world, storage, step, |_| ())
}

/// Saves a checkpoint of the only shard, with a manifest that `forge` has changed.
fn save_forged(
    world: &mut World,
    storage: &Arc<dyn CheckpointStorage>,
    step: u64,
    forge: impl Fn(&mut Contents),
) -> CheckpointId {
    let epoch = RestoreEpoch(1);
    let step = GlobalStep(step);
    let save = Save::begin(storage.clone(), epoch, step, None).unwrap();
    let name = Text::clipped(save.name().to_string());
    let line = world.join(0, &mut Peer { role: Role::Peer {}, ..worker(9) });
    let now = world.now;
    world.shards[0].keep_cut_as_of(now, step);
    let request = world.say(line, message::SaveShard { name: name.clone() }.into());
    let entry = world.answer_body(line, request);
    let entry: ShardEntry = serde_json::from_slice(&entry).unwrap();
    let training = by_sgd(&world.catalogue);
    let shards = vec![entry];
    let user = Vec::new();
    let mut contents = Contents { saved_unix_ms: 1, training, shards, user };
    forge(&mut contents);
    save.publish(&world.catalogue.clone(), contents).unwrap();
    CheckpointId { name, epoch, step }
}

#[test]
fn state_from_before_a_restore_does_not_outlive_it() {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, chief_line, storage) = world(folder.path());
    let mut peer = worker(1);
    let line = world.join(0, &mut peer);
    for sequence in 1..=2 {
        push(&mut world, line, sequence);
    }
    let checkpoint = save(&mut world, &storage, 2);
    for sequence in 3..=5 {
        push(&mut world, line, sequence);
    }
    let held = world.token(line);
    let epoch = RestoreEpoch(2);
    let restore = message::Restore { checkpoint: checkpoint.clone(), epoch };
    let ready = world.say(chief_line, restore.clone().into());
    assert_eq!(world.answer(chief_line, ready), None, "the checkpoint is being checked");
    assert!(world.closed.is_empty(), "the training goes on");
    world.advance_restore();
    assert_eq!(world.answer(chief_line, ready), None, "the checkpoint is being read");
    assert!(world.closed.contains(&line), "all other clients are disconnected");
    world.disconnect(line);

    // A new client connects, and one that knows the epoch that ends.
    let mut newcomer = worker(2);
    let early = world.join(0, &mut newcomer);
    let token = message::TokenRequest { newest: TokenId(0) };
    assert_eq!(world.refused(early, token.into()), Refusal::NotInitialized {});
    let hello =
        pushpull_common::protocol::message::Hello { seen_epoch: RestoreEpoch(1), ..peer.hello(0) };
    let busy = world.handshake(0, hello.clone(), false).unwrap_err();
    assert!(matches!(busy, Refusal::Busy { .. }), "the client is to connect again later: {busy}");
    // The chief asks again, and is answered once.
    let again = world.say(chief_line, restore.into());
    world.finish_restores();
    assert_eq!(world.answer(chief_line, ready), None);
    assert!(matches!(world.answer(chief_line, again), Some(Message::Ready(_))));

    let gone = world.handshake(0, hello, false).unwrap_err();
    let found = RestoreEpoch(1);
    let current = epoch;
    let step = GlobalStep(2);
    assert_eq!(gone, Refusal::RestoreEpoch { found, current, step });
    assert_eq!(f32s(&world.values(chief_line)), [2.0; 4]);
    let grant = world.token(early);
    assert_eq!(grant.step, GlobalStep(2));
    assert!(grant.token > held.token, "ids are not reused");
    world.restart(0).unwrap();
    let line = world.join(0, &mut chief());
    assert_eq!(f32s(&world.values(line)), [2.0; 4]);
    push(&mut world, line, 1);
    assert_eq!(world.metrics().global_step, 3);
}

#[test]
fn effects_go_back_with_the_values_in_which_they_have_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, chief_line, storage) = world(folder.path());
    let mut peer = worker(1);
    let line = world.join(0, &mut peer);
    let opened = coordinator_is(world.ask(line, open("trainer")));
    let push_effect = |world: &mut World, line, sequence, effect| {
        let grant = world.token(line);
        let push_slot = world.push_slot(line);
        let push = Push::gradient(sequence, grant, push_slot);
        let push = Push { effect: Some(effect), ..push };
        let body = bytes_of(&[-1_f32; ELEMENTS as usize]);
        match world.push_answer(line, &push, &[(0, &body)]) {
            Message::PushAnswer(answer) => Ok(answer.outcome != Outcome::Repeated {}),
            Message::Refused(refused) => Err(refused.refusal),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(push_effect(&mut world, line, 1, effect(&opened, 1)), Ok(true));
    assert_eq!(push_effect(&mut world, line, 2, effect(&opened, 3)), Ok(true));
    let checkpoint = save(&mut world, &storage, 2);
    assert_eq!(push_effect(&mut world, line, 3, effect(&opened, 2)), Ok(true));
    assert_eq!(push_effect(&mut world, line, 4, effect(&opened, 4)), Ok(true));
    coordinator_is(world.ask(line, open("another")));
    world.disconnect(line);
    let ready = restore(&mut world, chief_line, checkpoint, 2);
    assert!(matches!(ready, Some(Message::Ready(_))), "{ready:?}");
    for _ in 0..2 {
        let line = world.join(0, &mut peer.restarted());
        let query = |name| Message::from(message::CoordinatorQuery { name: Text::clipped(name) });
        let found = coordinator_is(world.ask(line, query("trainer")));
        assert!(found.coordinator == opened.coordinator && found.epoch > opened.epoch);
        assert_eq!((found.settled.0, found.window), (1, 0b10));
        assert!(matches!(
            world.refused(line, query("another")),
            Refusal::UnknownCoordinator { .. }
        ));
        world.restart(0).unwrap();
    }
    let line = world.join(0, &mut worker(3));
    // The coordinator has seen four effects settle, and two of them are undone.
    let late = EffectRef { settled: EffectNumber(4), ..effect(&opened, 5) };
    let fenced = push_effect(&mut world, line, 1, late);
    assert!(matches!(fenced, Err(Refusal::CoordinatorEpoch { .. })), "{fenced:?}");
    let resumed = coordinator_is(world.ask(line, open("trainer")));
    assert_eq!(push_effect(&mut world, line, 2, effect(&resumed, 3)), Ok(false));
    assert_eq!(push_effect(&mut world, line, 3, effect(&resumed, 2)), Ok(true));
    assert_eq!(f32s(&world.values(line)), [3.0; 4]);
}

#[test]
fn a_checkpoint_that_differs_from_the_request_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, chief_line, storage) = world(folder.path());
    let line = world.join(0, &mut worker(1));
    push(&mut world, line, 1);
    let checkpoint = save(&mut world, &storage, 1);
    let wrong_ids = [
        CheckpointId { step: GlobalStep(7), ..checkpoint.clone() },
        CheckpointId { name: Text::clipped("ckpt-1-9"), ..checkpoint.clone() },
    ];
    for (epoch, wrong_id) in (2..).zip(wrong_ids) {
        let restore = message::Restore { checkpoint: wrong_id, epoch: RestoreEpoch(epoch) };
        let request = world.say(chief_line, restore.into());
        world.finish_restores();
        let Some(Message::Refused(refused)) = world.answer(chief_line, request) else { panic!() };
        assert!(matches!(refused.refusal, Refusal::Checkpoint { .. }), "{}", refused.refusal);
        assert_eq!(f32s(&world.values(chief_line)), [1.0; 4], "nothing has changed");
    }
    let last = message::Restore { checkpoint, epoch: RestoreEpoch(u32::MAX) };
    let refusal = world.refused(chief_line, last.into());
    assert!(matches!(refusal, Refusal::RestoreEpoch { .. }), "no epoch is above it: {refusal}");
}

/// A storage that nobody may use.
#[derive(Debug)]
struct Untouched;

impl CheckpointStorage for Untouched {
    fn list(&self, folder: Option<&str>) -> Result<Vec<String>, StorageFault> {
        panic!("{folder:?} is listed");
    }

    fn create_folder(&self, folder: &str) -> Result<(), StorageFault> {
        panic!("{folder:?} is created");
    }

    fn create(&self, folder: &str, file: &str) -> Result<Box<dyn WriteFile>, StorageFault> {
        panic!("{file:?} is created in {folder:?}");
    }

    fn open(&self, folder: &str, file: &str) -> Result<Box<dyn ReadFile>, StorageFault> {
        panic!("{file:?} is opened in {folder:?}");
    }

    fn rename_folder(&self, from: &str, to: &str) -> Result<(), StorageFault> {
        panic!("{from:?} is renamed to {to:?}");
    }

    fn remove_folder(&self, folder: &str) -> Result<(), StorageFault> {
        panic!("{folder:?} is removed");
    }

    fn sync(&self, folder: Option<&str>) -> Result<(), StorageFault> {
        panic!("{folder:?} is synced");
    }
}

/// The storage joins the names of checkpoints to its own path, so no other name may get there.
#[test]
fn a_name_that_no_checkpoint_can_have_is_refused_without_a_look_at_the_storage() {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, chief_line, storage) = world(folder.path());
    push(&mut world, chief_line, 1);
    let peer = world.join(0, &mut Peer { role: Role::Peer {}, ..worker(9) });
    world.storage = Some(Arc::new(Untouched));
    let names = [
        "../ckpt-1-1",
        "/etc/passwd",
        "",
        ".",
        "..",
        "ckpt-1-1/..",
        "ckpt-1-1/../ckpt-1-1",
        "ckpt-1-1\0",
        "ckpt-1-1.tmp",
        " ckpt-1-1",
    ];
    let epoch = RestoreEpoch(2);
    for hostile in names {
        let is_refused = |refusal: &Refusal| matches!(refusal, Refusal::Checkpoint { .. });
        let part = message::SaveShard { name: Text::new(hostile).unwrap() };
        // The answer comes at once, so no work was ordered.
        let refusal = world.refused(peer, part.into());
        assert!(is_refused(&refusal), "{hostile:?}: {refusal:?}");
        let name = Text::new(hostile).unwrap();
        let checkpoint = CheckpointId { name, epoch: RestoreEpoch(1), step: GlobalStep(1) };
        let prepare = message::PrepareRestore { checkpoint: checkpoint.clone(), epoch };
        for message in [prepare.into(), message::Restore { checkpoint, epoch }.into()] {
            let request = world.say(chief_line, message);
            world.finish_restores();
            let Some(Message::Refused(refused)) = world.answer(chief_line, request) else {
                panic!("accepted: {hostile:?}")
            };
            assert!(is_refused(&refused.refusal), "{hostile:?}: {refused:?}");
        }
    }
    assert!(world.closed.is_empty(), "no restore has begun");
    // Nothing is left behind that keeps a save or a restore of the same epoch from its turn.
    world.storage = Some(storage.clone());
    let checkpoint = save(&mut world, &storage, 1);
    let ready = restore(&mut world, chief_line, checkpoint, epoch.0);
    assert!(matches!(ready, Some(Message::Ready(_))), "{ready:?}");
    assert_eq!(f32s(&world.values(chief_line)), [1.0; 4]);
}

/// Changes a checkpoint in its folder.
type Damage<'a> = &'a dyn Fn(&std::path::Path);

#[test]
fn a_refused_restore_leaves_the_training_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, mut chief_line, storage) = world_with_table(folder.path(), 8);
    let mut peer = worker(1);
    let mut line = world.join(0, &mut peer);
    let flip = |path: &std::path::Path, at: usize| {
        let mut bytes = std::fs::read(path).unwrap();
        let at = at % bytes.len();
        bytes[at] ^= 1;
        std::fs::write(path, bytes).unwrap();
    };
    let cut = |path: &std::path::Path| {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    };
    let file = "shard-0-0.safetensors";
    let table = "table-1.safetensors";
    let cases: [(&str, Damage<'_>); 10] = [
        ("no such checkpoint", &|it| std::fs::remove_dir_all(it).unwrap()),
        ("no manifest", &|it| std::fs::remove_file(it.join("MANIFEST")).unwrap()),
        ("half a manifest", &|it| cut(&it.join("MANIFEST"))),
        ("another catalogue", &|it| flip(&it.join("CATALOGUE"), 9)),
        ("no file of the shard", &|it| std::fs::remove_file(it.join(file)).unwrap()),
        ("half a file of the shard", &|it| cut(&it.join(file))),
        ("one bit of its last byte", &|it| flip(&it.join(file), usize::MAX)),
        ("no file of the table", &|it| std::fs::remove_file(it.join(table)).unwrap()),
        ("half a file of the table", &|it| cut(&it.join(table))),
        ("one bit of a row", &|it| flip(&it.join(table), usize::MAX)),
    ];
    let mut sequence = 0;
    for (steps, (case, damage)) in (1..).zip(cases) {
        sequence += 1;
        push_with_rows(&mut world, line, sequence);
        let checkpoint = save(&mut world, &storage, steps);
        damage(&folder.path().join(checkpoint.name.as_str()));
        let epoch = RestoreEpoch(2);
        let held = world.token(line);
        let prepare = message::PrepareRestore { checkpoint: checkpoint.clone(), epoch };
        for message in [prepare.into(), message::Restore { checkpoint, epoch }.into()] {
            let request = world.say(chief_line, message);
            world.finish_restores();
            let Some(Message::Refused(refused)) = world.answer(chief_line, request) else {
                panic!("accepted: {case}")
            };
            assert!(matches!(refused.refusal, Refusal::Storage { .. }), "{case}: {refused:?}");
        }
        let is_open = |it: &ConnectionId| !world.closed.contains(it);
        assert!([line, chief_line].iter().all(is_open), "{case}: no client is told of a restore");
        assert_eq!(f32s(&world.values(chief_line)), [steps as f32; 4], "{case}");
        assert_eq!(rows(&mut world, chief_line), [steps as f32; 6], "{case}");
        let token = held.token;
        let generation = held.generation;
        world.ask(line, message::ReturnToken { token, generation }.into());
        // Also after a kill.
        world.restart(0).unwrap();
        chief_line = world.join(0, &mut chief());
        let hello = message::Hello { seen_epoch: RestoreEpoch(1), ..peer.hello(0) };
        line = world.handshake(0, hello, false).unwrap().0;
        assert_eq!(f32s(&world.values(chief_line)), [steps as f32; 4], "{case}");
        assert_eq!(rows(&mut world, chief_line), [steps as f32; 6], "{case}");
    }
}

#[test]
fn a_checkpoint_with_more_rows_than_a_table_holds_is_refused_before_anything_changes() {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, _, storage) = world_with_table(folder.path(), 8);
    let line = world.join(0, &mut worker(1));
    push_with_rows(&mut world, line, 1);
    let checkpoint = save(&mut world, &storage, 1);
    let (mut small, chief_line, _) = world_with_table(folder.path(), 2);
    let prepare = message::PrepareRestore { checkpoint, epoch: RestoreEpoch(2) };
    let request = small.say(chief_line, prepare.into());
    small.finish_restores();
    let Some(Message::Refused(refused)) = small.answer(chief_line, request) else {
        panic!("three rows fit a table of two");
    };
    let Refusal::Checkpoint { detail } = refused.refusal else { panic!("{refused:?}") };
    assert!(detail.as_str().contains("\"users\""), "{}", detail.as_str());
    assert_eq!(f32s(&small.values(chief_line)), [0.0; 4]);
}

#[test]
fn a_prepared_restore_changes_nothing_and_is_not_checked_again() {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, chief_line, storage) = world_with_table(folder.path(), 8);
    let line = world.join(0, &mut worker(1));
    push_with_rows(&mut world, line, 1);
    let checkpoint = save(&mut world, &storage, 1);
    let epoch = RestoreEpoch(2);
    let prepare = message::PrepareRestore { checkpoint: checkpoint.clone(), epoch };
    let request = world.say(chief_line, prepare.into());
    push_with_rows(&mut world, line, 2);
    world.finish_restores();
    assert!(matches!(world.answer(chief_line, request), Some(Message::RestorePrepared(_))));
    push_with_rows(&mut world, line, 3);
    assert_eq!(f32s(&world.values(line)), [3.0; 4]);
    assert_eq!(rows(&mut world, line), [3.0; 6]);
    // What was checked is open, so the checkpoint may be deleted meanwhile.
    std::fs::remove_dir_all(folder.path().join(checkpoint.name.as_str())).unwrap();
    let restore = message::Restore { checkpoint, epoch };
    let request = world.say(chief_line, restore.into());
    assert!(world.closed.contains(&line), "the restore has begun");
    world.finish_restores();
    assert!(matches!(world.answer(chief_line, request), Some(Message::Ready(_))));
    assert_eq!(f32s(&world.values(chief_line)), [1.0; 4]);
    assert_eq!(rows(&mut world, chief_line), [1.0; 6]);
}

#[test]
fn a_check_for_an_older_chief_or_a_lost_connection_begins_no_restore() {
    for (older_chief, prepared) in [(true, true), (true, false), (false, true), (false, false)] {
        let folder = tempfile::tempdir().unwrap();
        let (mut world, chief_line, storage) = world(folder.path());
        let line = world.join(0, &mut worker(1));
        push(&mut world, line, 1);
        let checkpoint = save(&mut world, &storage, 1);
        push(&mut world, line, 2);
        let epoch = RestoreEpoch(2);
        let message: Message = match prepared {
            true => message::PrepareRestore { checkpoint, epoch }.into(),
            false => message::Restore { checkpoint, epoch }.into(),
        };
        world.say(chief_line, message);
        let check = world.take_restore();
        match older_chief {
            true => _ = world.join(0, &mut chief().restarted()),
            false => world.disconnect(chief_line),
        }
        let result = Box::new(check.run(storage));
        world.input(0, ShardInput::RestoreAdvanced(result));
        world.finish_restores();
        assert!(!world.closed.contains(&line));
        assert_eq!(f32s(&world.values(line)), [2.0; 4]);
    }
}

/// Changes the contents of a manifest.
type Forge<'a> = &'a dyn Fn(&mut Contents);

/// Declares the variables again, restores this checkpoint, and returns the answer.
fn restore(
    world: &mut World,
    line: ConnectionId,
    checkpoint: CheckpointId,
    epoch: u32,
) -> Option<Message> {
    let catalogue = world.catalogue.clone();
    world.declare(line, &catalogue);
    let restore = message::Restore { checkpoint, epoch: RestoreEpoch(epoch) };
    let request = world.say(line, restore.into());
    world.finish_restores();
    world.answer(line, request)
}

#[test]
fn a_checkpoint_with_impossible_counts_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, chief_line, storage) = world(folder.path());
    let far = RESTORED_LIMIT;
    let optimizer = |contents: &mut Contents| contents.training.optimizers[0].kind = "adam".into();
    let version = |contents: &mut Contents| contents.shards[0].version = far;
    let gradients = |contents: &mut Contents| contents.shards[0].gradients = u64::MAX;
    let nothing = |_: &mut Contents| ();
    let cases: [(u64, Forge<'_>, &str); 4] = [
        (1, &optimizer, "\"w\": the checkpoint NAME has it trained by adam, not sgd"),
        (2, &version, "NAME: its version is 36028797018963968, not below 36028797018963968"),
        (
            3,
            &gradients,
            "NAME: its count of gradients is 18446744073709551615, not below 36028797018963968",
        ),
        (far, &nothing, "NAME: its step is 36028797018963968, not below 36028797018963968"),
    ];
    let saved: Vec<_> = cases
        .map(|(step, forge, expected)| (save_forged(&mut world, &storage, step, forge), expected))
        .into();
    for (epoch, (checkpoint, expected)) in (2..).zip(saved) {
        let name = checkpoint.name.clone();
        let Some(Message::Refused(refused)) = restore(&mut world, chief_line, checkpoint, epoch)
        else {
            panic!("accepted: {expected}")
        };
        let found = refused.refusal.to_string();
        let expected = format!("cannot restore {}", expected.replace("NAME", name.as_str()));
        assert!(found.contains(&expected), "{found}, not {expected}");
    }
}

#[test]
fn the_largest_accepted_counts_leave_an_arena_that_opens_again() {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, chief_line, storage) = world(folder.path());
    let last = RESTORED_LIMIT - 1;
    let checkpoint = save_forged(&mut world, &storage, last, |contents| {
        contents.shards[0].version = last;
        contents.shards[0].gradients = last;
    });
    let answer = restore(&mut world, chief_line, checkpoint, 2);
    assert!(matches!(answer, Some(Message::Ready(_))), "{answer:?}");
    push(&mut world, chief_line, 1);
    world.restart(0).unwrap();
    let line = world.join(0, &mut chief());
    assert_eq!(world.token(line).step, GlobalStep(last + 1));
}

/// Optimizer slots that begin again have no past, at any step of the training.
#[test]
fn variables_that_are_initialized_again_are_counted_from_one() {
    let variables = vec![VariableSpec::f32("w", [ELEMENTS]).unwrap()];
    let (mut world, lines) = World::ready(variables, Adam::new(0.5), |config| config);
    push(&mut world, lines[0], 1);
    let first = world.values(lines[0]);
    for sequence in 2..=5 {
        push(&mut world, lines[0], sequence);
    }
    assert_eq!(world.shards[0].variables.gradients, 5);
    world.shards[0].forget_variables().unwrap();
    let catalogue = world.catalogue.clone();
    world.declare(lines[0], &catalogue);
    let initialize = message::Initialize { epoch: RestoreEpoch(2) };
    assert!(matches!(world.ask(lines[0], initialize.into()), Message::Ready(_)));
    world.restart(0).unwrap();
    let line = world.join(0, &mut chief());
    assert_eq!(f32s(&world.values(line)), [0.0; 4]);
    push(&mut world, line, 6);
    assert_eq!(world.values(line), first);
    assert_eq!((world.shards[0].variables.gradients, world.metrics().global_step), (1, 6));
}

/// Returns the error of a save, or of a restore if `reads`, that is given up in this way while the
/// second piece of the shard's file is read.
fn given_up(reads: bool, give_up: impl Fn(&mut World, ConnectionId)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, chief_line, storage) = world_of(folder.path(), 1 << 20);
    let gate = Gate::new(storage.clone());
    let save = Save::begin(storage.clone(), RestoreEpoch(1), GlobalStep(0), None).unwrap();
    let name = Text::clipped(save.name().to_string());
    let peer = world.join(0, &mut Peer { role: Role::Peer {}, ..worker(9) });
    let gated: Arc<dyn CheckpointStorage> = Arc::new(gate.clone());
    let run: Box<dyn FnOnce() -> Result<(), String> + Send> = if reads {
        let checkpoint = self::save(&mut world, &storage, 0);
        let catalogue = world.catalogue.clone();
        world.declare(chief_line, &catalogue);
        let restore = message::Restore { checkpoint, epoch: RestoreEpoch(2) };
        world.say(chief_line, restore.into());
        let restore = world.take_restore();
        Box::new(move || restore.run(gated).error())
    } else {
        world.say(peer, message::SaveShard { name }.into());
        let save = world.take_save();
        Box::new(move || save.run(gated).map(|_| ()).map_err(|fault| fault.to_string()))
    };
    gate.let_through(1);
    let running = std::thread::spawn(run);
    gate.wait_for_reader();
    give_up(&mut world, peer);
    gate.let_through(1);
    let error = running.join().unwrap().unwrap_err();
    assert_eq!(gate.passed(), 2, "no piece is read after the present one");
    error
}

#[test]
fn a_stop_waits_only_for_the_piece_that_is_being_read() {
    for reads in [false, true] {
        let error = given_up(reads, |world, _| world.shards[0].abandon_files());
        assert!(error.contains("cannot read") && error.contains("the server stops"), "{error}");
    }
}

#[test]
fn a_restore_of_an_older_chief_is_given_up() {
    let error = given_up(true, |world, _| _ = world.join(0, &mut chief().restarted()));
    assert!(error.contains("another chief has joined"), "{error}");
}

#[test]
fn a_save_for_a_client_that_is_gone_is_given_up() {
    let error = given_up(false, |world, peer| {
        let other = world.join(0, &mut worker(3));
        world.disconnect(other);
        world.disconnect(peer);
    });
    assert!(error.contains("the requester is gone"), "{error}");
}

#[test]
fn a_shard_pins_nothing_while_its_part_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let (mut world, _, storage) = world(folder.path());
    let save = Save::begin(storage.clone(), RestoreEpoch(1), GlobalStep(0), None).unwrap();
    let name = Text::clipped(save.name().to_string());
    let peer = world.join(0, &mut Peer { role: Role::Peer {}, ..worker(9) });
    world.say(peer, message::SaveShard { name }.into());
    let gate = Gate::new(storage);
    gate.let_through(0);
    let save = world.take_save();
    let gated = Arc::new(gate.clone());
    let running = std::thread::spawn(move || save.run(gated));
    gate.wait_for_reader();
    // The save pins no memory any more, so it is not given up for memory.
    world.shards[0].checkpoints.release_checkpoint_pins();
    gate.open_all();
    running.join().unwrap().unwrap();
}
