//! Exhaustive exploration of the rules of effects: every state that a coordinator, a few workers
//! and two shards can reach.
//!
//! The shards' [`Coordinators`] are the real code. A push first arrives at the step owner, and goes
//! to the other shard after the owner's answer. On each shard it is whole before it is applied, and
//! other messages may come in between. A message may arrive at any time, also after the death of
//! its sender.
//!
//! Every event is either *due* or a *fault*, of which each setting allows a few. In every state
//! without due events, all effects must have counted.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use pushpull_common::effect_window::{EffectWindow, Settlement};
use pushpull_common::ids::{CoordinatorEpoch, CoordinatorId, EffectNumber};
use pushpull_common::protocol::message::CoordinatorIs;
use pushpull_common::protocol::{EffectId, EffectRef};
use pushpull_store::planted::PlantedBugs;

use super::{Coordinators, EffectVerdict};

/// The remaining number of each fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Faults {
    /// A worker is killed, and starts again. Its messages may still arrive.
    kills: u8,
    /// A worker is taken for dead. It continues, and its effect is executed again.
    suspicions: u8,
    /// The coordinator is killed, and resumes.
    resumes: u8,
}

/// A configuration to explore.
#[derive(Clone, Copy, Debug)]
struct ModelSetting {
    name: &'static str,
    workers: usize,
    coordinators: u64,
    /// An effect that makes no push.
    quiet: Option<u64>,
    /// Times that the coordinator closes and begins again under the same name.
    renewals: u8,
    faults: Faults,
    planted: PlantedBugs,
}

/// The running coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Coordinator {
    coordinator: CoordinatorId,
    epoch: CoordinatorEpoch,
    /// The effects that have settled, as far as it knows.
    known: EffectWindow,
    /// Whether the other shard has answered.
    is_open: bool,
}

/// What a worker waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Execution {
    effect: EffectRef,
    shard: usize,
    /// Whether the coordinator takes its worker for dead.
    is_suspected: bool,
}

/// A message on its way to a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum ModelMessage {
    Push { shard: usize, effect: (u64, u64, u64, u64), from: Option<usize> },
    Open { coordinator: CoordinatorId, epoch: CoordinatorEpoch },
    Close { epoch: CoordinatorEpoch },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ModelShard {
    coordinators: Coordinators,
    /// The whole pushes that are not applied, in the order of their arrival.
    whole: Vec<(EffectRef, Option<usize>)>,
    /// The count of each effect of each coordinator.
    counted: BTreeMap<(u64, u64), u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ModelState {
    shards: [ModelShard; 2],
    coordinator: Option<Coordinator>,
    workers: Vec<Option<Execution>>,
    /// Messages under way, each kind once for each sender and effect.
    messages: BTreeSet<ModelMessage>,
    newest_epoch: u64,
    renewals: u8,
    /// Whether the last training is over.
    has_ended: bool,
    faults: Faults,
}

const OWNER: usize = 0;
const OTHER: usize = 1;
const NAME: &str = "trainer";

fn window_of(coordinators: &CoordinatorIs) -> EffectWindow {
    EffectWindow::of(coordinators.settled, coordinators.window).expect("a shard has valid windows")
}

impl ModelState {
    fn new(setting: &ModelSetting) -> ModelState {
        let shard = ModelShard {
            coordinators: Coordinators::new(setting.planted),
            whole: Vec::new(),
            counted: BTreeMap::new(),
        };
        ModelState {
            shards: [shard.clone(), shard],
            coordinator: None,
            workers: vec![None; setting.workers],
            messages: BTreeSet::new(),
            newest_epoch: 0,
            renewals: setting.renewals,
            has_ended: false,
            faults: setting.faults,
        }
    }

    /// Returns the states after each due event, with the event.
    fn due(&self, setting: &ModelSetting) -> Vec<(String, ModelState)> {
        let mut after = Vec::new();
        let mut add = |event: String, change: &dyn Fn(&mut ModelState)| {
            let mut next = self.clone();
            change(&mut next);
            // The places that have changed are saved, and no decision depends on them.
            next.shards.iter_mut().for_each(|shard| _ = shard.coordinators.take_changed());
            after.push((event, next));
        };
        for &message in &self.messages {
            add(format!("{message:?} arrives"), &|next| next.arrive(message));
        }
        for shard in [OWNER, OTHER] {
            if let Some((effect, _)) = self.shards[shard].whole.first() {
                add(format!("shard {shard} applies {effect:?}"), &|next| next.apply(shard));
            }
        }
        match &self.coordinator {
            None if !self.has_ended => add("the coordinator opens".into(), &ModelState::open),
            Some(Coordinator { is_open: true, known, .. }) => {
                if known.settled().0 >= setting.coordinators {
                    add("the coordinator closes".into(), &ModelState::close);
                }
                for number in known.unsettled(EffectNumber(setting.coordinators)) {
                    if setting.quiet == Some(number.0) {
                        add(format!("effect {number} ends"), &|next| next.settles(number));
                    } else if !self.is_executed(number)
                        && let Some(worker) = self.workers.iter().position(Option::is_none)
                    {
                        let event = format!("worker {worker} executes effect {number}");
                        add(event, &|next| next.execute(worker, number));
                    }
                }
            }
            _ => {}
        }
        after
    }

    /// Returns the states after each fault, with the fault.
    fn faults(&self) -> Vec<(String, ModelState)> {
        let mut after = Vec::new();
        for (worker, execution) in self.workers.iter().enumerate() {
            let Some(execution) = execution else { continue };
            if self.faults.kills > 0 {
                let mut next = self.clone();
                next.faults.kills -= 1;
                next.lose_worker(worker);
                after.push((format!("worker {worker} is killed"), next));
            }
            if self.faults.suspicions > 0 && !execution.is_suspected {
                let mut next = self.clone();
                next.faults.suspicions -= 1;
                next.workers[worker] = Some(Execution { is_suspected: true, ..*execution });
                after.push((format!("worker {worker} is suspected"), next));
            }
        }
        if self.faults.resumes > 0 && self.coordinator.is_some() {
            let mut next = self.clone();
            next.faults.resumes -= 1;
            next.coordinator = None;
            after.push(("the coordinator is killed".into(), next));
        }
        after
    }

    /// Returns whether a worker executes this effect for the running coordinator.
    fn is_executed(&self, number: EffectNumber) -> bool {
        let epoch = self.coordinator.as_ref().map(|coordinator| coordinator.epoch);
        self.workers.iter().flatten().any(|execution| {
            let id = execution.effect.id;
            id.number == number && Some(id.epoch) == epoch && !execution.is_suspected
        })
    }

    fn open(&mut self) {
        self.newest_epoch += 1;
        let epoch = CoordinatorEpoch(self.newest_epoch);
        let opened = self.shards[OWNER]
            .coordinators
            .open(NAME, epoch)
            .expect("the owner opens coordinators");
        let coordinator = opened.coordinator;
        let known = window_of(&opened);
        self.coordinator = Some(Coordinator { coordinator, epoch, known, is_open: false });
        self.messages.insert(ModelMessage::Open { coordinator, epoch });
    }

    /// Closes the coordinator on the step owner, which ends the training. The coordinator may be
    /// killed before the other shard is told, and may begin another training before.
    fn close(&mut self) {
        let Some(Coordinator { epoch, .. }) = self.coordinator.take() else { return };
        self.shards[OWNER].coordinators.close(NAME, epoch).expect("the newest coordinator closes");
        self.messages.insert(ModelMessage::Close { epoch });
        self.has_ended = self.renewals == 0;
        self.renewals = self.renewals.saturating_sub(1);
    }

    fn settles(&mut self, number: EffectNumber) {
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.known.settle(number);
        }
    }

    fn execute(&mut self, worker: usize, number: EffectNumber) {
        let Some(Coordinator { coordinator, epoch, known, .. }) = self.coordinator else { return };
        let effect = EffectRef {
            id: EffectId { coordinator, epoch, number },
            settled: known.settled(),
            digest: 0,
        };
        self.send(worker, OWNER, effect);
    }

    /// Sends the share of a shard.
    fn send(&mut self, worker: usize, shard: usize, effect: EffectRef) {
        let is_suspected = self.workers[worker].is_some_and(|before| before.is_suspected);
        self.workers[worker] = Some(Execution { effect, shard, is_suspected });
        let EffectRef { id, settled, .. } = effect;
        let effect = (id.coordinator.0, id.epoch.0, id.number.0, settled.0);
        self.messages.insert(ModelMessage::Push { shard, effect, from: Some(worker) });
    }

    fn lose_worker(&mut self, worker: usize) {
        self.workers[worker] = None;
        let of_nobody = |message: ModelMessage| match message {
            ModelMessage::Push { shard, effect, from } if from == Some(worker) => {
                ModelMessage::Push { shard, effect, from: None }
            }
            other => other,
        };
        self.messages = self.messages.iter().copied().map(of_nobody).collect();
        for (_, from) in self.shards.iter_mut().flat_map(|shard| &mut shard.whole) {
            *from = from.filter(|&from| from != worker);
        }
    }

    fn arrive(&mut self, message: ModelMessage) {
        self.messages.remove(&message);
        match message {
            ModelMessage::Push { shard, effect: (coordinator, epoch, number, settled), from } => {
                let coordinator = CoordinatorId(coordinator);
                let epoch = CoordinatorEpoch(epoch);
                let id = EffectId { coordinator, epoch, number: EffectNumber(number) };
                let effect = EffectRef { id, settled: EffectNumber(settled), digest: 0 };
                match self.shards[shard].coordinators.check(&effect) {
                    Ok(EffectVerdict::Counts) => self.shards[shard].whole.push((effect, from)),
                    Ok(EffectVerdict::Repeated) => self.answer(shard, effect, from, true),
                    Err(_) => self.answer(shard, effect, from, false),
                }
            }
            ModelMessage::Open { coordinator, epoch } => {
                let opened = self.shards[OTHER].coordinators.open_as(NAME, coordinator, epoch);
                if let Some(coordinator) = &mut self.coordinator
                    && coordinator.epoch == epoch
                {
                    let opened = opened.expect("the newest coordinator opens");
                    coordinator.known = coordinator.known.intersection(window_of(&opened));
                    coordinator.is_open = true;
                }
            }
            ModelMessage::Close { epoch } => {
                // Refused if the next training has begun there.
                let _ = self.shards[OTHER].coordinators.close(NAME, epoch);
            }
        }
    }

    /// Applies the first whole push of a shard, or drops it.
    fn apply(&mut self, shard: usize) {
        let (effect, from) = self.shards[shard].whole.remove(0);
        let of = &mut self.shards[shard];
        let counts = match of.coordinators.check(&effect) {
            Ok(EffectVerdict::Counts) => {
                of.coordinators.settle(&effect);
                *of.counted.entry((effect.id.coordinator.0, effect.id.number.0)).or_default() += 1;
                true
            }
            Ok(EffectVerdict::Repeated) => true,
            Err(_) => false,
        };
        self.answer(shard, effect, from, counts);
    }

    /// A shard answers the push of a worker, if that is alive: the effect has counted there, or the
    /// push is refused.
    fn answer(&mut self, shard: usize, effect: EffectRef, from: Option<usize>, counts: bool) {
        let Some(worker) = from else { return };
        if counts && shard == OWNER {
            return self.send(worker, OTHER, effect);
        }
        self.workers[worker] = None;
        if let Some(coordinator) = &mut self.coordinator
            && coordinator.epoch == effect.id.epoch
            && counts
        {
            coordinator.known.settle(effect.id.number);
        }
    }

    /// Checks the promises. An error is what is broken.
    fn check(&self, setting: &ModelSetting) -> Result<(), String> {
        for (index, shard) in self.shards.iter().enumerate() {
            if let Some((effect, count)) = shard.counted.iter().find(|(_, count)| **count > 1) {
                return Err(format!(
                    "effect {effect:?} has counted {count} times on shard {index}"
                ));
            }
            for (_, entry) in shard.coordinators.entries() {
                for number in
                    (1..=setting.coordinators).filter(|&number| setting.quiet != Some(number))
                {
                    let settled = entry.window.state(EffectNumber(number)) == Settlement::Settled;
                    let counted = shard.counted.contains_key(&(entry.coordinator.0, number));
                    if settled != counted {
                        return Err(format!(
                            "effect {number} on shard {index}: settled {settled}, counted {counted}"
                        ));
                    }
                }
            }
        }
        let Some(coordinator) = &self.coordinator else { return Ok(()) };
        for number in (1..=setting.coordinators).filter(|&number| setting.quiet != Some(number)) {
            let known = coordinator.known.state(EffectNumber(number)) == Settlement::Settled;
            let key = (coordinator.coordinator.0, number);
            let counted = self.shards.iter().all(|shard| shard.counted.contains_key(&key));
            if known && coordinator.is_open && !counted {
                return Err(format!("effect {number} is reported settled, and is not everywhere"));
            }
        }
        Ok(())
    }

    /// Checks a state in which nothing is due.
    fn check_end(&self, setting: &ModelSetting) -> Result<(), String> {
        let pushes = setting.coordinators - u64::from(setting.quiet.is_some());
        let expected = pushes as usize * (1 + usize::from(setting.renewals));
        let counted = self.shards.each_ref().map(|shard| shard.counted.len());
        match self.has_ended && counted == [expected; 2] {
            true => Ok(()),
            false => Err(format!("nothing is due, and {counted:?} effects have counted: {self:?}")),
        }
    }
}

/// Explores every state of a setting. Returns their number.
fn explore(setting: &ModelSetting) -> Result<usize, String> {
    let fingerprint = |state: &ModelState| {
        let mut hasher = DefaultHasher::new();
        state.hash(&mut hasher);
        hasher.finish()
    };
    let start = ModelState::new(setting);
    let mut seen = HashSet::from([fingerprint(&start)]);
    let mut pending = vec![start];
    while let Some(state) = pending.pop() {
        let due = state.due(setting);
        if due.is_empty() {
            state.check_end(setting).map_err(|broken| format!("{}: {broken}", setting.name))?;
        }
        for (event, next) in due.into_iter().chain(state.faults()) {
            next.check(setting).map_err(|broken| format!("{}: {event}: {broken}", setting.name))?;
            if seen.insert(fingerprint(&next)) {
                pending.push(next);
            }
        }
    }
    Ok(seen.len())
}

fn settings(planted: PlantedBugs) -> Vec<ModelSetting> {
    let setting = ModelSetting {
        name: "three effects without a fault",
        workers: 2,
        coordinators: 3,
        quiet: None,
        renewals: 0,
        faults: Faults::default(),
        planted,
    };
    let faults = |kills, suspicions, resumes| Faults { kills, suspicions, resumes };
    vec![
        setting,
        ModelSetting { name: "a worker is killed twice", faults: faults(2, 0, 0), ..setting },
        ModelSetting { name: "a living worker is suspected", faults: faults(0, 1, 0), ..setting },
        ModelSetting { name: "the coordinator resumes", faults: faults(0, 0, 1), ..setting },
        ModelSetting {
            name: "a worker and the coordinator are killed",
            faults: faults(1, 0, 1),
            ..setting
        },
        ModelSetting {
            name: "an effect makes no push, and the coordinator resumes",
            quiet: Some(2),
            faults: faults(1, 0, 1),
            ..setting
        },
        ModelSetting {
            name: "two effects, every fault, and two resumes",
            coordinators: 2,
            faults: faults(1, 1, 2),
            ..setting
        },
        ModelSetting {
            name: "the coordinator closes and begins again",
            coordinators: 1,
            renewals: 1,
            faults: faults(1, 1, 2),
            ..setting
        },
    ]
}

/// Explores all settings. Returns the number of states.
pub(crate) fn suite(planted: PlantedBugs) -> usize {
    let mut states = 0;
    for setting in settings(planted) {
        let count = explore(&setting).unwrap_or_else(|broken| panic!("{broken}"));
        println!("{:55} {count:9} states", setting.name);
        states += count;
    }
    states
}

#[test]
fn every_effect_counts_once_on_each_shard_and_none_is_reported_early() {
    let states = suite(PlantedBugs::default());
    println!("{{\"test\":\"coordinators\",\"states\":{states},\"broken\":0}}");
}
