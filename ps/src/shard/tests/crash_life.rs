//! A scenario that goes through every kind of change to a shard's persistent state.

use std::sync::Arc;
use std::time::Duration;

use pushpull_common::ids::{RestoreEpoch, Sequence};
use pushpull_common::protocol::message::{self, Operation};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Envelope, Grant, Message, Outcome};
use pushpull_common::table::{Eviction, TableSpec};
use pushpull_common::tensor::{DType, Shape};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::{Adagrad, Lamb, Optimizer, OptimizerRules, Sgd};
use pushpull_store::planted::PlantedBugs;
use pushpull_store::testing::test_files::TestFiles;

use super::effects::{coordinator_is, effect, open};
use super::peers::{Push, bytes_of, chief, index_of, place, variables, worker};
use super::world::{ConnectionId, Observer, World};
use crate::config::{PsConfig, Storage};

/// The size of a block: the variables before `table` fill three blocks.
pub(super) const BLOCK_BYTES: usize = 256;
const LEASE: Duration = Duration::from_millis(400);

/// The settings of one run of the scenario.
#[derive(Clone, Debug)]
pub(super) struct CrashScenario {
    pub(super) optimizer: Arc<dyn Optimizer>,
    /// Whether two more variables have optimizers of their own: `dense` has LAMB, which makes two
    /// passes, and `bias` has one with another number of slots.
    pub(super) mixed: bool,
    /// Whether blocks are written with streaming stores, past the cache.
    pub(super) past_cache: bool,
    /// Whether rows of `users` are pushed, and more clients join than the control file first holds.
    pub(super) many_clients: bool,
    pub(super) planted: PlantedBugs,
    pub(super) seed: u64,
}

impl CrashScenario {
    pub(super) fn configure(&self, config: PsConfig) -> PsConfig {
        let mut rules = OptimizerRules::new(self.optimizer.clone());
        rules.optimizer_for("users".into(), Arc::new(Adagrad::new(0.5)));
        if self.mixed {
            rules.optimizer_for("dense".into(), Arc::new(Lamb::new(0.1).weight_decay(0.01)));
            rules.optimizer_for("bias".into(), Arc::new(Adagrad::new(0.5)));
        }
        let cached_bytes_max = if self.past_cache { 0 } else { config.cached_bytes_max };
        let config =
            config.storage(Storage::memory().integrity_full(true)).inbox_pushes(2).lease(LEASE);
        PsConfig {
            rules,
            block_bytes: BLOCK_BYTES,
            cached_bytes_max,
            planted: self.planted,
            ..config
        }
    }
}

/// `dense` (150 f32, at 0) and `bias` (4 f32, at 600) are trained, `sums` (36 f32, at 616) and `n`
/// (1 i64, at 760) are plain: 768 bytes. `table` (40 rows of 5 f32, at 768) is sparse, and has its
/// index at 3328. `users` is a table that grows: 220 rows of 2 f32 at once, at 1568, and their ids
/// at 3496; it holds 230 rows and evicts the least recent.
pub(super) fn model() -> Vec<VariableSpec> {
    vec![
        VariableSpec::f32("dense", [150]).unwrap(),
        VariableSpec::f32("bias", [4]).unwrap(),
        VariableSpec::f32("sums", [36]).unwrap().plain(),
        VariableSpec::new("n", DType::I64, Shape::new([1]).unwrap()).unwrap(),
        VariableSpec::f32("table", [40, 5]).unwrap().sparse(),
        users(),
    ]
}

fn users() -> VariableSpec {
    let users = TableSpec::new(230 * (16 + TableSpec::ROW_OVERHEAD_BYTES)).rows_at_once(220);
    let users = users.eviction(Eviction::LeastRecent).expire_after(6);
    VariableSpec::table("users", DType::F32, [2], users).unwrap()
}

pub(super) fn numbers(count: usize, seed: f32) -> Vec<u8> {
    bytes_of(&(0..count).map(|i| (i as f32 * 0.37 + seed).sin()).collect::<Vec<f32>>())
}

/// A world whose one shard is on these test files and has had no input.
pub(super) fn begin(scenario: &CrashScenario, test_files: TestFiles) -> World {
    let optimizer = Sgd::new(1.0);
    World::on(
        super::world::LIFE,
        model(),
        optimizer,
        |config| scenario.configure(config),
        |_| test_files.clone(),
    )
}

/// A world on these test files whose variables are ready, and the connection of a worker.
pub(super) fn begin_training(
    scenario: &CrashScenario,
    test_files: TestFiles,
) -> (World, ConnectionId) {
    let mut world = begin(scenario, test_files);
    let line = world.join(0, &mut chief());
    let catalogue = world.catalogue.clone();
    assert!(matches!(world.declare(line, &catalogue), Message::Declared(_)));
    assert!(matches!(
        world.ask(line, message::Initialize { epoch: RestoreEpoch(1) }.into()),
        Message::Ready(_)
    ));
    let line = world.join(0, &mut worker(1));
    (world, line)
}

fn return_token(grant: Grant) -> Message {
    message::ReturnToken { token: grant.token, generation: grant.generation }.into()
}

fn applied(answer: &Message) {
    assert!(matches!(answer, Message::PushAnswer(_)), "a push is answered {answer:?}");
}

/// Runs the scenario on these test files, and returns the configuration of the shard. The observer
/// is called before the first input and after each one.
pub(super) fn run(
    scenario: &CrashScenario,
    test_files: TestFiles,
    mut observer: Observer,
) -> Arc<PsConfig> {
    let mut world = begin(scenario, test_files);
    observer(&world.shards[0]);
    world.observer = Some(observer);

    // Variables are declared, and declared differently before they are initialized.
    let mut first = chief();
    let line = world.join(0, &mut first);
    // The first declaration contains the variables with their own optimizers, too.
    let named = model().into_iter().filter(|variable| ["dense", "bias"].contains(&variable.name()));
    let others = variables().into_iter().chain([users()]).chain(named).collect();
    let catalogue = world.catalogue.clone();
    let other = place(others, 1);
    assert!(matches!(world.declare(line, &other), Message::Declared(_)));
    assert!(matches!(world.declare(line, &catalogue), Message::Declared(_)));

    // Two dense variables are assigned before all are initialized: one in new blocks, one in place.
    let sums = Push::plain(1, Operation::Assign {}, world.push_slot(line));
    applied(&world.push_answer(line, &sums, &[(616, &numbers(36, 1.0))]));
    let n = Push::plain(2, Operation::Assign {}, world.push_slot(line));
    applied(&world.push_answer(line, &n, &[(760, &bytes_of(&[7_i64]))]));
    // So are all rows, in two pushes, of which the second alone has the last row.
    for (sequence, rows) in [(3, 0..30_u32), (4, 30..40)] {
        let push = Push::plain(sequence, Operation::Assign {}, world.push_slot(line));
        let rows: Vec<u32> = rows.collect();
        let values = numbers(5 * rows.len(), 8.0);
        applied(&world.push_answer(line, &push, &[(3328, &index_of(&rows)), (768, &values)]));
    }
    assert!(matches!(
        world.ask(line, message::Initialize { epoch: RestoreEpoch(1) }.into()),
        Message::Ready(_)
    ));

    // A worker pushes all dense gradients, and receives the next token with the answer.
    let mut peer = worker(1);
    let line = world.join(0, &mut peer);
    let all = numbers(154, 2.0);
    let push = Push { next: true, ..world.gradient(line, 1) };
    let Message::PushAnswer(answer) = world.push_answer(line, &push, &[(0, &all)]) else {
        panic!("not applied")
    };
    // A few bytes, which are changed in place.
    let grant = answer.next.expect("training has no last step");
    let push = Push::gradient(2, grant, answer.push_slot);
    applied(&world.push_answer(line, &push, &[(600, &numbers(4, 3.0))]));
    // A few rows in place, one of which spans two blocks; then all rows.
    for (sequence, rows) in [(8, vec![1_u32, 2, 12, 38]), (9, (0..40).collect())] {
        let push = world.gradient(line, sequence);
        let index = index_of(&rows);
        let values = numbers(5 * rows.len(), 6.0);
        applied(&world.push_answer(line, &push, &[(3328, &index), (768, &values)]));
    }
    // Enough rows of a table to grow its index by a page; then more, for which some are
    // evicted. All but the last rows expire later.
    let pushes = [(10, 0..200_u64), (11, 190..240), (12, 3..6)];
    // Only with many clients: a table does not depend on how blocks are written.
    for (sequence, ids) in pushes.into_iter().filter(|_| scenario.many_clients) {
        let ids: Vec<u64> = ids.collect();
        let push = world.gradient(line, sequence);
        let index = index_of(&ids);
        let values = numbers(2 * ids.len(), 7.0);
        applied(&world.push_answer(line, &push, &[(3496, &index), (1568, &values)]));
    }
    let evicted = world.metrics().table_rows_evicted;
    assert_eq!(evicted > 0, scenario.many_clients, "{evicted} rows were evicted");
    // A push in parts, which are applied as they arrive.
    let push = world.gradient(line, 3);
    let parts = [(0, &all[..256]), (256, &all[256..400]), (400, &all[400..])];
    applied(&world.push_answer(line, &push, &parts));
    // A push in parts whose shadow blocks are discarded, because another push is whole first.
    let slow = world.gradient(line, 4);
    world.send(line, slow.envelope(), slow.part(0, None), &all[..256]);
    let quick = Push::plain(5, Operation::AssignAdd {}, world.push_slot(line));
    applied(&world.push_answer(line, &quick, &[(616, &numbers(36, 4.0))]));
    let rest = slow.part(256, Some(616));
    let request = world.send(line, slow.envelope(), rest, &all[256..]);
    world.work();
    applied(&world.answer(line, request).expect("the push is answered"));

    // A coordinator opens. An effect is pushed twice, and the coordinator resumes.
    let opened = coordinator_is(world.ask(line, open("trainer")));
    for (sequence, repeated) in [(13, false), (14, true)] {
        let push = Push { effect: Some(effect(&opened, 2)), ..world.gradient(line, sequence) };
        let answer = world.push_answer(line, &push, &[(600, &numbers(4, 8.0))]);
        let Message::PushAnswer(answer) = answer else { panic!("{answer:?}") };
        assert_eq!(answer.outcome == Outcome::Repeated {}, repeated);
    }
    let opened = coordinator_is(world.ask(line, open("trainer")));

    // One push is withdrawn, its token is returned, and an earlier push is resent.
    let push = world.gradient(line, 6);
    world.send(line, push.envelope(), push.part(0, None), &all[..256]);
    let withdrawn = Envelope { sequence: Sequence(6), ..Envelope::default() };
    world.send(line, withdrawn, message::Withdraw {}.into(), &[]);
    world.say(line, return_token(push.grant));
    applied(&world.push_answer(line, &quick, &[(616, &numbers(36, 4.0))]));

    // The worker restarts while a push of its older incarnation is whole and not applied.
    let push = Push { effect: Some(effect(&opened, 1)), ..world.gradient(line, 7) };
    world.push(line, &push, &[(0, &all)]);
    let line = world.join(0, &mut peer.restarted());
    let push = world.gradient(line, 1);
    world.push(line, &push, &[(600, &numbers(4, 5.0))]);
    world.work();

    // The coordinator closes. One worker leaves, one is lost, and training ends.
    let name = Text::clipped("trainer");
    world.ask(line, message::CloseCoordinator { name, epoch: opened.epoch }.into());
    let other = world.join(0, &mut worker(2));
    world.token(other);
    world.say(other, message::Leave {}.into());
    let chief = world.join(0, &mut first);
    world.token(line);
    world.pass(LEASE + Duration::from_millis(50), &[chief]);
    world.say(chief, message::Finish {}.into());
    for task in 10..if scenario.many_clients { 25 } else { 10 } {
        world.join(0, &mut worker(task));
    }
    world.config.clone()
}
