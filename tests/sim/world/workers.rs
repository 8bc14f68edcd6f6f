//! The simulated worker processes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pushpull_worker::simulation as worker;

use super::{ScheduledEvent, SimWorld, WorkerProcess};
use crate::chance::SimChance;
use crate::network::{Direction, Item, LinkClient};
use crate::trainer::{NextAction, Phase, Trainer};

impl WorkerProcess {
    /// Names the process. The name does not depend on other processes.
    pub(super) fn name(&self) -> String {
        format!("process {} of worker {}", self.life, self.trainer.task)
    }
}

impl SimWorld {
    pub(super) fn start_worker(&mut self, task: u32) {
        let number = self.processes.len();
        let of_task = self.processes.iter().filter(|other| other.trainer.task == task);
        let life = 1 + of_task.count() as u64;
        let name = format!("process {life} of worker {task}");
        let mut chance = SimChance::of(self.setting.seed, &name);
        let incarnation = 1000 * u64::from(task) + 2 * life + chance.between(0, 1);
        let trainer = Trainer::new(task, &self.setting, incarnation, &mut chance);
        let catalogue = Arc::clone(&self.setting.catalogue);
        let cluster = &self.setting.cluster;
        #[allow(unused_mut, reason = "for a planted bug")]
        let mut endpoint = worker::SessionEndpoint::new(
            cluster,
            task,
            task == 0,
            incarnation,
            catalogue,
            self.setting.part_bytes,
        );
        #[cfg(feature = "planted")]
        if self.setting.planted.bug() == Some(pushpull_ps::Bug::SlotReusedEarly) {
            endpoint.overwrite_push_slots();
        }
        #[cfg(feature = "planted")]
        if self.setting.planted.bug() == Some(pushpull_ps::Bug::OwnerNotAsked) {
            endpoint.skip_owner();
        }
        self.processes.push(WorkerProcess {
            endpoint,
            trainer,
            links: BTreeMap::new(),
            armed: None,
            paused_until: None,
            is_alive: true,
            life,
            chance,
        });
        let process = &mut self.processes[number];
        process.trainer.begin(self.now, &mut process.endpoint);
        self.settle_process(number);
    }

    pub(super) fn with_process(
        &mut self,
        process: usize,
        act: impl FnOnce(&mut worker::SessionEndpoint),
    ) {
        if self.processes[process].is_alive {
            act(&mut self.processes[process].endpoint);
            self.settle_process(process);
        }
    }

    /// Carries out a session's outputs until there are none, then schedules its timer.
    pub(super) fn settle_process(&mut self, number: usize) {
        let now = self.now;
        while let Some(event) = self.processes[number].endpoint.poll() {
            match event {
                worker::EndpointEvent::Connect { link, shard } => {
                    let client = LinkClient::Worker { process: number, link };
                    let connection = self.open(client, shard);
                    self.processes[number].links.insert(link, connection);
                }
                worker::EndpointEvent::Disconnect { link } => {
                    if let Some(connection) = self.processes[number].links.remove(&link) {
                        self.drop_connection(connection);
                    }
                }
                worker::EndpointEvent::Send { link, frame } => {
                    if let Some(&connection) = self.processes[number].links.get(&link) {
                        self.send(connection, Direction::ToServer, Item::Bytes(frame.into()));
                    }
                }
                worker::EndpointEvent::ContinueRead => {
                    let chance = &mut self.processes[number].chance;
                    let pause = match chance.between(0, 99) {
                        // Descheduled, sometimes for longer than the stall timeout.
                        0 | 1 => chance.millis(100, 1500),
                        2..=9 => chance.millis(5, 100),
                        _ => chance.micros(1, 2000),
                    };
                    self.after(pause, ScheduledEvent::Read(number));
                }
                worker::EndpointEvent::Reply { op, reply } => {
                    self.trace.note(|| format!("  process {number} is answered {}", short(&reply)));
                    let WorkerProcess { endpoint, trainer, chance, .. } =
                        &mut self.processes[number];
                    let checker = &mut self.checker;
                    let action = trainer.on_reply(now, endpoint, op, reply, checker, chance);
                    match action {
                        None => {}
                        Some(NextAction::Gradient(time)) => {
                            self.after(time, ScheduledEvent::Computed(number));
                        }
                        Some(NextAction::SlowGradient(time)) => {
                            self.after(time, ScheduledEvent::ComputedSlow(number));
                        }
                        Some(NextAction::Pause(time, op)) => {
                            self.after(time, ScheduledEvent::Again(number, op))
                        }
                    }
                    if self.processes[number].trainer.is_over() {
                        self.end_process(number);
                        return;
                    }
                }
            }
        }
        if self.processes[number].trainer.is_over() {
            return self.end_process(number);
        }
        let process = &mut self.processes[number];
        let wake = process.endpoint.wake_at(now).max(now + Duration::from_micros(1));
        if process.armed.is_none_or(|(armed, _)| wake < armed) {
            if let Some(later) = process.armed {
                self.queue.remove(&later);
            }
            let key = self.at(wake, ScheduledEvent::Wake(number));
            self.processes[number].armed = Some(key);
        }
    }

    pub(super) fn computed(&mut self, number: usize, slow: bool) {
        let process = &mut self.processes[number];
        if process.is_alive {
            let WorkerProcess { endpoint, trainer, chance, .. } = process;
            let (now, setting, checker) = (self.now, &self.setting, &mut self.checker);
            match slow {
                true => trainer.push_slow(now, endpoint, setting, checker, chance),
                false => trainer.push(now, endpoint, setting, checker, chance),
            }
            self.settle_process(number);
        }
    }

    pub(super) fn again(&mut self, number: usize, op: u64) {
        let process = &mut self.processes[number];
        if process.is_alive {
            process.trainer.again(self.now, &mut process.endpoint, op, &mut self.checker);
            self.settle_process(number);
        }
    }

    /// Ends a process, which has finished or is killed.
    pub(super) fn end_process(&mut self, number: usize) {
        let process = &mut self.processes[number];
        process.is_alive = false;
        let fenced = process.trainer.phase == Phase::Fenced;
        let links: Vec<u64> = std::mem::take(&mut process.links).into_values().collect();
        for connection in links {
            self.drop_connection(connection);
        }
        let WorkerProcess { trainer, chance, .. } = &mut self.processes[number];
        let task = trainer.task;
        if trainer.phase == (Phase::Left { ended: false }) && self.setting.waits() {
            let delay = chance.millis(300, 3000);
            self.after(delay, ScheduledEvent::Start(task));
        }
        // Of two processes that were never welcomed, the last to send a hello counts as the newer.
        let of_task = self.processes.iter().filter(|other| other.trainer.task == task);
        let is_alone = of_task.count() == 1;
        assert!(
            !(fenced && is_alone) || self.retired() > 0,
            "process {number} of worker {task} is fenced without a newer process"
        );
        let lives = |other: &WorkerProcess| other.trainer.task == task && other.is_alive;
        let is_given_up = fenced && self.retired() > 0;
        if is_given_up && !self.processes.iter().any(lives) {
            let delay = self.processes[number].chance.millis(300, 3000);
            self.after(delay, ScheduledEvent::Start(task));
        }
    }
}

fn short(reply: &Result<worker::WorkerAnswer, pushpull_worker::Error>) -> String {
    match reply {
        Ok(worker::WorkerAnswer::Pulled(_, step)) => format!("values of step {step}"),
        Ok(answer) => format!("{answer:?}"),
        Err(error) => format!("{error}"),
    }
}
