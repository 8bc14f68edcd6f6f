//! Every state that a few replicas, shards and faults can reach: the rules of synchronous steps,
//! driven as they are.
//!
//! The step owner ([`StepCoordinator`]) is the real one, and so is a shard's part ([`StepFollower`]); beside it,
//! a shard here has rooms with whole pushes. What one says to another may arrive at any time, and is said again after a
//! restart; a process that is killed keeps what is durable. Everything that happens is either
//! *due* (it happens sooner or later, unless something else makes it moot) or a *fault*, of which
//! each setting allows a few. In every state in which nothing is due any more, training must have
//! ended: that is the absence of deadlock, and because what is due always makes progress, of
//! livelock.

use std::collections::{BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::step_coordinator::{Asked, Grant, Rule, StepCoordinator, Verdict};
use super::step_follower::StepFollower;
use crate::planted::PlantedBugs;
use crate::shard::replicas::ClientKey;

/// How often each fault may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Faults {
    /// A replica is killed. It may be started again, and parts that it has sent still arrive.
    kills: u8,
    /// A replica that is alive is taken for lost.
    losses: u8,
    /// A replica has no more to do and leaves.
    leaves: u8,
    /// A token has been out for too long.
    timeouts: u8,
    /// The step owner is killed, and started again.
    owner_kills: u8,
    /// Another shard is killed, and started again.
    shard_kills: u8,
}

/// What is explored.
#[derive(Clone, Copy, Debug)]
struct Setting {
    name: &'static str,
    shards: usize,
    /// Replicas that are there from the start, and that may come later.
    replicas: usize,
    late: usize,
    rule: Rule,
    faults: Faults,
    /// Whether everything takes its time. Where not, what nobody could tell from happening later is
    /// done at once, see [`World::settle`].
    slow: bool,
    planted: PlantedBugs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Replica {
    /// Not started yet.
    Absent,
    Idle,
    /// Has a token, has sent its push to some shards, and may have heard what became of it.
    Working {
        grant: Grant,
        step: u64,
        sent: u32,
        verdict: Option<Verdict>,
    },
    Killed,
    Left,
}

/// A shard: what it keeps in its arena, and its round.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Shard {
    /// The tokens of the pushes that lie whole here.
    whole: BTreeSet<u64>,
    follower: StepFollower,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    owner: StepCoordinator,
    shards: Vec<Shard>,
    replicas: Vec<Replica>,
    /// Parts that killed replicas have sent and that may still arrive.
    ghosts: Vec<Ghost>,
    /// The tokens whose pushes were accepted for a step that some shard has still to apply.
    accepted: BTreeSet<(u64, u64)>,
    push_slots: usize,
    faults: Faults,
    slow: bool,
}

/// Parts of the push of a killed replica, to these shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Ghost {
    token: u64,
    step: u64,
    left: u32,
}

/// Something that can happen.
#[derive(Clone, Copy, Debug)]
enum Event {
    // Due.
    Ask(usize),
    Rejoin(usize),
    Push { replica: usize, shard: usize },
    HearVerdict(usize),
    SayHeld { shard: usize, token: u64 },
    SayApplied(usize),
    Learn(usize),
    Work(usize),
    LeaseEnds(usize),
    JoinTimeout,
    // Faults.
    Kill(usize),
    Start(usize),
    LoseLiving(usize),
    Leave(usize),
    TokenTimeout(usize),
    GhostPush { ghost: usize, shard: usize },
    KillOwner,
    KillShard(usize),
}

impl Event {
    fn is_due(self) -> bool {
        !matches!(
            self,
            Event::Kill(_)
                | Event::Start(_)
                | Event::LoseLiving(_)
                | Event::Leave(_)
                | Event::TokenTimeout(_)
                | Event::GhostPush { .. }
                | Event::KillOwner
                | Event::KillShard(_)
        )
    }
}

fn key(replica: usize) -> ClientKey {
    ClientKey(replica as u32)
}

impl World {
    fn new(setting: &Setting) -> World {
        let Setting { shards, rule, planted, .. } = *setting;
        let mut owner = StepCoordinator::new(rule, shards, planted);
        for replica in 0..setting.replicas {
            owner.join(key(replica), replica as u32);
        }
        let shard = Shard { whole: BTreeSet::new(), follower: StepFollower::new(0, planted) };
        let mut replicas = vec![Replica::Idle; setting.replicas];
        replicas.resize(setting.replicas + setting.late, Replica::Absent);
        let (faults, slow, push_slots) = (setting.faults, setting.slow, rule.push_slots);
        let (shards, ghosts, accepted) = (vec![shard; shards], Vec::new(), BTreeSet::new());
        World { owner, shards, replicas, ghosts, accepted, push_slots, faults, slow }
    }

    /// What can happen here.
    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (index, replica) in self.replicas.iter().enumerate() {
            let live = self.owner.is_live(key(index));
            match *replica {
                Replica::Absent => events.push(Event::Start(index)),
                Replica::Left => {}
                Replica::Killed => {
                    events.push(Event::Start(index));
                    if live {
                        events.push(Event::LeaseEnds(index));
                    }
                }
                Replica::Idle => {
                    events.push(if live { Event::Ask(index) } else { Event::Rejoin(index) });
                    if live && self.faults.leaves > 0 {
                        events.push(Event::Leave(index));
                    }
                }
                Replica::Working { sent, verdict, .. } => {
                    for shard in 0..self.shards.len() {
                        if sent & 1 << shard == 0 && self.has_room(shard) {
                            events.push(Event::Push { replica: index, shard });
                        }
                    }
                    if verdict.is_some() {
                        events.push(Event::HearVerdict(index));
                    } else if self.faults.timeouts > 0 {
                        events.push(Event::TokenTimeout(index));
                    }
                }
            }
            if matches!(replica, Replica::Idle | Replica::Working { .. }) {
                if self.faults.kills > 0 {
                    events.push(Event::Kill(index));
                }
                if self.faults.losses > 0 && live {
                    events.push(Event::LoseLiving(index));
                }
            }
        }
        for (index, shard) in self.shards.iter().enumerate() {
            events.extend(shard.whole.iter().map(|&token| Event::SayHeld { shard: index, token }));
            events.extend([Event::SayApplied(index), Event::Learn(index)]);
            if shard.follower.due().is_some() {
                events.push(Event::Work(index));
            }
            if self.faults.shard_kills > 0 {
                events.push(Event::KillShard(index));
            }
        }
        for (ghost, Ghost { left, .. }) in self.ghosts.iter().enumerate() {
            let shards = 0..self.shards.len();
            let shards = shards.filter(|&shard| left & 1 << shard != 0 && self.has_room(shard));
            events.extend(shards.map(|shard| Event::GhostPush { ghost, shard }));
        }
        if self.owner.expects() > 0 {
            events.push(Event::JoinTimeout);
        }
        if self.faults.owner_kills > 0 {
            events.push(Event::KillOwner);
        }
        events
    }

    /// The world after an event; an error if a promise is broken by it.
    fn after(&self, event: Event) -> Result<World, String> {
        let mut world = self.clone();
        match event {
            Event::Ask(replica) => match world.owner.ask(key(replica)) {
                Asked::Granted(grant) => {
                    let step = self.owner.step();
                    world.replicas[replica] =
                        Replica::Working { grant, step, sent: 0, verdict: None };
                }
                Asked::Wait | Asked::Ended => {}
            },
            Event::Rejoin(replica) => world.owner.join(key(replica), replica as u32),
            Event::Push { replica, shard } => {
                if let Replica::Working { grant, step, sent, .. } = &mut world.replicas[replica] {
                    *sent |= 1 << shard;
                    let (token, step) = (grant.token, *step);
                    world.receive(shard, token, step);
                }
            }
            Event::HearVerdict(replica) => world.go_on(replica)?,
            Event::SayHeld { shard, token } => world.say_held(shard, token),
            Event::SayApplied(shard) => {
                world.owner.applied(shard, self.shards[shard].follower.step());
            }
            Event::Learn(shard) => {
                if let Some(committed) = self.owner.committed() {
                    world.shards[shard].follower.learn(&committed);
                }
            }
            Event::Work(shard) => world.work(shard)?,
            Event::LeaseEnds(replica) => world.owner.lose(key(replica)),
            Event::JoinTimeout => world.owner.expect_nobody(),
            Event::Kill(replica) => {
                world.faults.kills -= 1;
                if let Replica::Working { grant, step, sent, .. } = self.replicas[replica] {
                    let left = !sent & ((1 << self.shards.len()) - 1);
                    world.ghosts.push(Ghost { token: grant.token, step, left });
                }
                world.replicas[replica] = Replica::Killed;
            }
            Event::Start(replica) => {
                world.owner.fence(key(replica));
                world.owner.join(key(replica), replica as u32);
                world.replicas[replica] = Replica::Idle;
            }
            Event::LoseLiving(replica) => {
                world.faults.losses -= 1;
                world.owner.lose(key(replica));
            }
            Event::Leave(replica) => {
                world.faults.leaves -= 1;
                world.owner.lose(key(replica));
                world.replicas[replica] = Replica::Left;
            }
            Event::TokenTimeout(replica) => {
                world.faults.timeouts -= 1;
                if let Replica::Working { grant, .. } = self.replicas[replica] {
                    world.owner.take_back(grant.token);
                }
            }
            Event::GhostPush { ghost, shard } => {
                let Ghost { token, step, left } = &mut world.ghosts[ghost];
                *left &= !(1 << shard);
                let (token, step) = (*token, *step);
                world.receive(shard, token, step);
            }
            Event::KillOwner => {
                world.faults.owner_kills -= 1;
                world.owner.restart();
            }
            Event::KillShard(shard) => {
                world.faults.shard_kills -= 1;
                let step = self.shards[shard].follower.step();
                world.shards[shard].follower = StepFollower::new(step, self.owner.planted());
            }
        }
        world.on_verdicts();
        world.ghosts.retain(|ghost| ghost.left != 0);
        if !self.slow {
            world.settle()?;
        }
        world.check()?;
        Ok(world)
    }

    /// Does what is due and could as well have been done later without anybody seeing a difference:
    /// shards hear what was decided; the step owner hears what they did, which they may as well
    /// have done later; and pushes are dropped of which no part can come any more.
    fn settle(&mut self) -> Result<(), String> {
        // What is not settled after two rounds happens as an event.
        for _ in 0..2 {
            for shard in 0..self.shards.len() {
                if let Some(committed) = self.owner.committed() {
                    self.shards[shard].follower.learn(&committed);
                }
                let whole: Vec<u64> = self.shards[shard].whole.iter().copied().collect();
                for token in whole {
                    if self.owner.is_of_use(token) || !self.may_be_sent(token) {
                        self.say_held(shard, token);
                    }
                }
                self.owner.applied(shard, self.shards[shard].follower.step());
            }
            self.on_verdicts();
            for replica in 0..self.replicas.len() {
                if let Replica::Working { verdict: Some(Verdict::Admitted { .. }), .. } =
                    self.replicas[replica]
                {
                    self.go_on(replica)?;
                }
            }
        }
        Ok(())
    }

    /// Whether parts may still come of the push of this token.
    fn may_be_sent(&self, token: u64) -> bool {
        let working = self.replicas.iter().any(
            |replica| matches!(replica, Replica::Working { grant, .. } if grant.token == token),
        );
        working || self.ghosts.iter().any(|ghost| ghost.token == token)
    }

    fn has_room(&self, shard: usize) -> bool {
        self.shards[shard].whole.len() < self.push_slots
    }

    /// A shard says that it holds a push, and drops it if it is told that it is over.
    fn say_held(&mut self, shard: usize, token: u64) {
        if !self.owner.held(shard, token, 0.0.into()) {
            self.shards[shard].whole.remove(&token);
        }
    }

    /// Replicas hear what became of their pushes.
    fn on_verdicts(&mut self) {
        for (grant, verdict) in self.owner.verdicts() {
            if let Verdict::Admitted { step } = verdict {
                self.accepted.insert((step, grant.token));
            }
            for replica in &mut self.replicas {
                if let Replica::Working { grant: own, verdict: heard, .. } = replica
                    && *own == grant
                {
                    *heard = Some(verdict);
                }
            }
        }
    }

    /// A replica has heard what became of its push.
    fn go_on(&mut self, replica: usize) -> Result<(), String> {
        let everywhere = (1 << self.shards.len()) - 1;
        if let Replica::Working { sent, verdict: Some(Verdict::Admitted { .. }), .. } =
            self.replicas[replica]
            && sent != everywhere
        {
            return Err(format!("replica {replica} has not sent what was admitted"));
        }
        self.replicas[replica] = Replica::Idle;
        Ok(())
    }

    /// The push of a token, which was granted at this step, comes to a shard that has room for it.
    fn receive(&mut self, shard: usize, token: u64, step: u64) {
        let Shard { whole, follower } = &mut self.shards[shard];
        // What it is for may have passed here.
        if follower.step() <= step {
            whole.insert(token);
            follower.whole(whole.iter().copied());
        }
    }

    /// A shard applies the step that is due.
    fn work(&mut self, shard: usize) -> Result<(), String> {
        let Shard { whole, follower } = &mut self.shards[shard];
        let Some(tokens) = follower.due().map(<[u64]>::to_vec) else { return Ok(()) };
        let step = follower.step();
        let admitted: Vec<u64> = self.owner.admitted().iter().map(|grant| grant.token).collect();
        if !self.owner.is_applying() || self.owner.step() != step + 1 {
            return Err(format!("shard {shard} applies step {step}, which is not committed"));
        }
        if tokens != admitted {
            return Err(format!("shard {shard} applies {tokens:?}, not {admitted:?}"));
        }
        let mut accepted = self.accepted.iter().filter(|(of, _)| *of == step);
        if let Some((_, token)) = accepted.find(|(_, token)| !tokens.contains(token)) {
            return Err(format!("token {token} was accepted, and step {step} is without it"));
        }
        for token in tokens {
            if !whole.remove(&token) {
                return Err(format!("shard {shard} lacks the push of token {token}"));
            }
        }
        follower.applied();
        let applied = self.shards.iter().map(|shard| shard.follower.step()).min().unwrap_or(0);
        self.accepted.retain(|&(step, _)| step >= applied);
        Ok(())
    }

    /// What holds at all times.
    fn check(&self) -> Result<(), String> {
        // Whoever has a token that is worth something reads the same step on every shard.
        for grant in self.owner.tokens_out() {
            let step = self.owner.step();
            if let Some(shard) = self.shards.iter().position(|shard| shard.follower.step() != step)
            {
                return Err(format!("{grant:?} of step {step} is out, shard {shard} is elsewhere"));
            }
        }
        for (index, shard) in self.shards.iter().enumerate() {
            let (here, there) = (shard.follower.step(), self.owner.step());
            if here > there || here + 1 < there {
                return Err(format!("shard {index} is at step {here}, the owner at {there}"));
            }
        }
        self.owner.check()
    }

    /// Whether nothing needs to happen any more.
    fn is_over(&self, rule: &Rule) -> bool {
        let ended = rule.last_step == Some(self.owner.step()) && !self.owner.is_applying();
        let alive = |replica: &Replica| matches!(replica, Replica::Idle | Replica::Working { .. });
        let waits = self.owner.is_short() && rule.floor > 0;
        ended || waits || !self.replicas.iter().any(alive)
    }
}

#[derive(Debug, Default)]
struct Explored {
    states: usize,
    ends: usize,
}

/// Walks through every state; an error is a broken promise, with all that led to it.
fn explore(setting: &Setting) -> Result<Explored, String> {
    fn fingerprint(world: &World) -> u64 {
        let mut hasher = DefaultHasher::new();
        world.hash(&mut hasher);
        hasher.finish()
    }
    let start = World::new(setting);
    let mut seen = HashSet::from([fingerprint(&start)]);
    let mut explored = Explored { states: 1, ends: 0 };
    // The way to where we are: a world, what has not been tried in it, whether anything was due.
    let events = start.events();
    let mut way: Vec<(World, Vec<Event>, bool, Option<Event>)> = vec![(start, events, false, None)];
    while let Some((world, events, any_due, _)) = way.last_mut() {
        let Some(event) = events.pop() else {
            if !*any_due {
                explored.ends += 1;
                if !world.is_over(&setting.rule) {
                    let world = format!("{world:#?}");
                    return Err(told(setting, &way, &format!("nothing is due in {world}")));
                }
            }
            way.pop();
            continue;
        };
        let next = match world.after(event) {
            Ok(next) => next,
            Err(broken) => return Err(told(setting, &way, &format!("after {event:?}: {broken}"))),
        };
        if next == *world {
            continue;
        }
        *any_due |= event.is_due();
        if seen.insert(fingerprint(&next)) {
            explored.states += 1;
            let events = next.events();
            way.push((next, events, false, Some(event)));
        }
    }
    Ok(explored)
}

fn told(
    setting: &Setting,
    way: &[(World, Vec<Event>, bool, Option<Event>)],
    broken: &str,
) -> String {
    let events: Vec<String> =
        way.iter().filter_map(|(.., event)| event.map(|event| format!("{event:?}"))).collect();
    format!("{}: {broken}\nafter:\n  {}", setting.name, events.join("\n  "))
}

const NONE: Faults =
    Faults { kills: 0, losses: 0, leaves: 0, timeouts: 0, owner_kills: 0, shard_kills: 0 };

fn rule(aggregate: u32, total: u32, steps: u64) -> Rule {
    let share = aggregate.div_ceil(total);
    let push_slots = (share * total) as usize;
    Rule {
        aggregate,
        total,
        floor: 0,
        ordered: false,
        push_slots,
        last_step: Some(steps),
        clip: None,
    }
}

fn settings(planted: PlantedBugs) -> Vec<Setting> {
    let plain = Setting {
        name: "",
        shards: 2,
        replicas: 2,
        late: 0,
        rule: rule(2, 2, 2),
        faults: NONE,
        slow: false,
        planted,
    };
    let kill = Faults { kills: 1, ..NONE };
    vec![
        Setting {
            name: "everything takes its time, step owner and replica are killed",
            rule: rule(2, 2, 1),
            faults: Faults { owner_kills: 1, ..kill },
            slow: true,
            ..plain
        },
        Setting {
            name: "everything takes its time, a ghost and a shard that is killed",
            faults: Faults { losses: 1, shard_kills: 1, ..NONE },
            slow: true,
            ..plain
        },
        Setting {
            name: "two replicas are killed, and the step owner",
            rule: rule(2, 2, 1),
            faults: Faults { kills: 2, owner_kills: 1, ..NONE },
            ..plain
        },
        Setting {
            name: "a ghost goes on pushing, a shard is killed",
            faults: Faults { losses: 1, shard_kills: 1, ..kill },
            ..plain
        },
        Setting {
            name: "one room for two replicas",
            rule: Rule { push_slots: 1, ..rule(1, 2, 2) },
            faults: Faults { losses: 1, owner_kills: 1, timeouts: 1, ..kill },
            ..plain
        },
        Setting {
            name: "a backup replica, one is killed",
            replicas: 3,
            rule: rule(2, 3, 2),
            faults: kill,
            ..plain
        },
        Setting {
            name: "shrinking in mid-step, twice",
            replicas: 3,
            rule: rule(3, 3, 1),
            faults: Faults { leaves: 1, ..kill },
            ..plain
        },
        Setting {
            name: "a late one, and one that leaves",
            replicas: 1,
            late: 1,
            faults: Faults { leaves: 1, losses: 1, owner_kills: 1, ..NONE },
            ..plain
        },
        Setting {
            name: "more gradients than replicas",
            rule: rule(3, 2, 1),
            faults: Faults { leaves: 1, ..kill },
            ..plain
        },
        Setting {
            name: "three shards",
            shards: 3,
            rule: rule(2, 2, 1),
            faults: Faults { owner_kills: 1, shard_kills: 1, ..kill },
            ..plain
        },
        Setting {
            name: "in the order of the replicas, who must not be fewer",
            rule: Rule { ordered: true, floor: 2, ..rule(2, 2, 2) },
            faults: Faults { owner_kills: 1, ..kill },
            ..plain
        },
    ]
}

/// Explores every setting; the first promise that is broken ends it.
pub(crate) fn suite(planted: PlantedBugs) -> usize {
    let mut states = 0;
    for setting in settings(planted) {
        let explored = explore(&setting).unwrap_or_else(|broken| panic!("{broken}"));
        let Explored { states: here, ends } = explored;
        println!("{:62} {here:9} states, {ends:6} of them ends", setting.name);
        states += here;
    }
    states
}

#[test]
fn a_dead_end_is_found() {
    // With fewer rooms than gradients in a step, admitted pushes fill them all.
    let setting = settings(PlantedBugs::default())[0];
    let setting = Setting { rule: Rule { push_slots: 1, ..setting.rule }, ..setting };
    let broken = explore(&setting).unwrap_err();
    assert!(broken.contains("nothing is due"), "{broken}");
}

#[test]
fn no_state_breaks_a_promise_or_is_a_dead_end() {
    let states = suite(PlantedBugs::default());
    println!("{{\"test\":\"exhaustive\",\"states\":{states},\"broken\":0}}");
}
